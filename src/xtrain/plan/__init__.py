"""Sizes, bytes and seconds of distributed training, computed without torch.

Standard library only, so the same code runs in a browser's Python.
"""

from xtrain.plan.activations import activation_memory
from xtrain.plan.all_reduce_traffic import hierarchical_between_nodes
from xtrain.plan.bubble import (
    bubble_over_ideal,
    idle_fraction,
    pipeline_activations,
    pipeline_delay,
    pipeline_idle,
)
from xtrain.plan.bus_bandwidth import (
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
)
from xtrain.plan.collective_time import (
    collective_time,
    crossover,
    fastest,
    hierarchical_time,
)
from xtrain.plan.collective_traffic import collective_traffic
from xtrain.plan.config_json import load_shape, shape_of_config
from xtrain.plan.context_parallel import (
    context_bytes,
    critical_pairs,
    hiding_tokens,
    ideal_pairs,
    pairs_by_step,
    pairs_of_block,
    ring_steps,
)
from xtrain.plan.cost import Cost, collective_cost
from xtrain.plan.decoder_activations import (
    decoder_activations,
    decoder_layer_activations,
    decoder_peak,
)
from xtrain.plan.device import DeviceParameters, device_parameters
from xtrain.plan.device_memory import (
    DeviceMemory,
    held_micro_batches,
    memory_over_step,
    memory_per_device,
    pipeline_positions,
    verdict,
)
from xtrain.plan.estimate import Assumptions, Estimate, Estimator, estimate
from xtrain.plan.experts import (
    ExpertMemory,
    all_to_all_bandwidth,
    all_to_all_bytes,
    balance_loss,
    bytes_between_nodes,
    copy_bytes,
    expert_capacity,
    expert_memory,
    expert_seconds,
    experts_for_free,
    hiding_width,
    nodes_visited,
    overlap_speedup,
    routed_bytes,
)
from xtrain.plan.hardware import ACCELERATORS, LINKS, Accelerator, Link, peak_flops
from xtrain.plan.layer_activations import LayerActivations, layer_activations
from xtrain.plan.layout import Layout, layers_of_stage
from xtrain.plan.layout_rules import (
    Broken,
    broken_rules,
    check_layout,
    padded_vocabulary,
)
from xtrain.plan.memory import (
    RECIPES,
    Recipe,
    StateMemory,
    state_memory,
    zero_memory,
)
from xtrain.plan.nccl import nccl_all_reduce_time, nccl_hop_seconds, nccl_protocol
from xtrain.plan.published import GPTShape, LatentShape
from xtrain.plan.search import Rejected, SearchResult, SearchSpace, search
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.tensor_parallel import (
    Call,
    bytes_sent,
    layer_calls,
    layer_flops,
    layer_seconds,
    tensor_parallel_calls,
    tokens_where_equal,
)
from xtrain.plan.throughput import (
    attention_flops,
    compute_bound_mixed,
    compute_bound_ranks,
    compute_bound_tokens,
    hardware_flops,
    layer_forward_flops,
    model_flops,
    training_days,
    utilization,
)
from xtrain.plan.traffic import Traffic, all_reduce_lower_bound, chunk_sizes
from xtrain.plan.transfer import DTYPES, Transfer, TransferDtypes

__all__ = [
    "decoder_activations",
    "decoder_layer_activations",
    "decoder_peak",
    "ACCELERATORS",
    "LINKS",
    "RECIPES",
    "Accelerator",
    "Call",
    "Cost",
    "Link",
    "ModelShape",
    "Recipe",
    "StateMemory",
    "Traffic",
    "activation_memory",
    "algorithm_bandwidth",
    "all_reduce_lower_bound",
    "bus_bandwidth",
    "bus_bandwidth_factor",
    "chunk_sizes",
    "collective_cost",
    "collective_time",
    "collective_traffic",
    "context_bytes",
    "critical_pairs",
    "crossover",
    "fastest",
    "hierarchical_between_nodes",
    "hiding_tokens",
    "hierarchical_time",
    "ideal_pairs",
    "nccl_all_reduce_time",
    "nccl_protocol",
    "pairs_by_step",
    "pairs_of_block",
    "peak_flops",
    "pipeline_activations",
    "pipeline_idle",
    "state_memory",
    "bytes_sent",
    "layer_calls",
    "layer_flops",
    "layer_seconds",
    "tensor_parallel_calls",
    "tokens_where_equal",
    "nccl_hop_seconds",
    "zero_memory",
    "Assumptions",
    "Broken",
    "DTYPES",
    "DeviceMemory",
    "DeviceParameters",
    "Estimate",
    "Estimator",
    "GPTShape",
    "LatentShape",
    "LayerActivations",
    "Layout",
    "Rejected",
    "SearchResult",
    "SearchSpace",
    "Transfer",
    "TransferDtypes",
    "attention_flops",
    "broken_rules",
    "check_layout",
    "compute_bound_mixed",
    "compute_bound_ranks",
    "compute_bound_tokens",
    "device_parameters",
    "estimate",
    "hardware_flops",
    "held_micro_batches",
    "layer_activations",
    "layer_forward_flops",
    "layers_of_stage",
    "load_shape",
    "memory_over_step",
    "memory_per_device",
    "model_flops",
    "padded_vocabulary",
    "bubble_over_ideal",
    "idle_fraction",
    "pipeline_delay",
    "pipeline_positions",
    "ring_steps",
    "search",
    "sent_by_axis",
    "shape_of_config",
    "traffic_per_step",
    "training_days",
    "utilization",
    "verdict",
    "ExpertMemory",
    "all_to_all_bandwidth",
    "all_to_all_bytes",
    "balance_loss",
    "bytes_between_nodes",
    "copy_bytes",
    "expert_capacity",
    "expert_memory",
    "expert_seconds",
    "experts_for_free",
    "hiding_width",
    "nodes_visited",
    "overlap_speedup",
    "routed_bytes",
]
