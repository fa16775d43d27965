"""Sizes, bytes and seconds of distributed training, computed without torch.

Standard library only, so the same code runs in a browser's Python.
"""

from xtrain.plan.activations import (
    LayerActivations,
    activation_memory,
    layer_activations,
)
from xtrain.plan.bubble import (
    bubble_over_ideal,
    idle_fraction,
    pipeline_activations,
    pipeline_delay,
    pipeline_idle,
)
from xtrain.plan.collective_traffic import (
    collective_traffic,
    hierarchical_between_nodes,
)
from xtrain.plan.config_json import (
    load_shape,
    shape_of_config,
)
from xtrain.plan.context_parallel import (
    context_bytes,
    critical_pairs,
    hiding_tokens,
    ideal_pairs,
    pairs_by_step,
    pairs_of_block,
    ring_steps,
)
from xtrain.plan.cost import (
    Cost,
    collective_cost,
    collective_time,
    crossover,
    fastest,
    hierarchical_time,
)
from xtrain.plan.decoder_activations import (
    decoder_activations,
    decoder_layer_activations,
    decoder_peak,
)
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
from xtrain.plan.explain import Change, limits, what_if, why_first
from xtrain.plan.hardware import (
    ACCELERATORS,
    LINKS,
    Accelerator,
    Link,
    peak_flops,
)
from xtrain.plan.kernels import Kernels
from xtrain.plan.layout import (
    DeviceParameters,
    Layout,
    device_parameters,
    layers_of_stage,
)
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
from xtrain.plan.nccl import (
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
    nccl_all_reduce_time,
    nccl_hop_seconds,
    nccl_protocol,
)
from xtrain.plan.published import GPTShape, LatentShape
from xtrain.plan.search import (
    Rejected,
    SearchResult,
    SearchSpace,
    search,
)
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.tensor_parallel import (
    TensorParallelCall,
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
from xtrain.plan.time_constants import EXACT, FITTED, RANGES, TimeConstants
from xtrain.plan.traffic import Traffic, all_reduce_lower_bound, chunk_sizes
from xtrain.plan.transfer import DTYPES, Transfer, TransferDtypes
from xtrain.plan.whole_run import (
    WholeRun,
    daly_interval,
    goodput,
    time_between_failures,
    whole_run,
    young_interval,
)

Call = TensorParallelCall  # its first name

__all__ = [
    "ACCELERATORS", "Accelerator", "Assumptions", "Broken", "Call", "Change", "Cost",
    "DTYPES", "DeviceMemory", "DeviceParameters", "EXACT", "Estimate", "Estimator",
    "ExpertMemory", "FITTED", "GPTShape", "Kernels", "LINKS", "LatentShape",
    "LayerActivations", "Layout", "Link", "ModelShape", "RANGES", "RECIPES", "Recipe",
    "Rejected", "SearchResult", "SearchSpace", "StateMemory", "TensorParallelCall",
    "TimeConstants", "Traffic", "Transfer", "TransferDtypes", "WholeRun",
    "activation_memory", "algorithm_bandwidth", "all_reduce_lower_bound",
    "all_to_all_bandwidth", "all_to_all_bytes", "attention_flops", "balance_loss",
    "broken_rules", "bubble_over_ideal", "bus_bandwidth", "bus_bandwidth_factor",
    "bytes_between_nodes", "bytes_sent", "check_layout", "chunk_sizes",
    "collective_cost", "collective_time", "collective_traffic", "compute_bound_mixed",
    "compute_bound_ranks", "compute_bound_tokens", "context_bytes", "copy_bytes",
    "critical_pairs", "crossover", "daly_interval", "decoder_activations",
    "decoder_layer_activations", "decoder_peak", "device_parameters", "estimate",
    "expert_capacity", "expert_memory", "expert_seconds", "experts_for_free",
    "fastest", "goodput", "hardware_flops", "held_micro_batches", "hiding_tokens",
    "hiding_width", "hierarchical_between_nodes", "hierarchical_time", "ideal_pairs",
    "idle_fraction", "layer_activations", "layer_calls", "layer_flops",
    "layer_forward_flops", "layer_seconds", "layers_of_stage", "limits", "load_shape",
    "memory_over_step", "memory_per_device", "model_flops", "nccl_all_reduce_time",
    "nccl_hop_seconds", "nccl_protocol", "nodes_visited", "overlap_speedup",
    "padded_vocabulary", "pairs_by_step", "pairs_of_block", "peak_flops",
    "pipeline_activations", "pipeline_delay", "pipeline_idle", "pipeline_positions",
    "ring_steps", "routed_bytes", "search", "sent_by_axis", "shape_of_config",
    "state_memory", "tensor_parallel_calls", "time_between_failures",
    "tokens_where_equal", "traffic_per_step", "training_days", "utilization",
    "verdict", "what_if", "whole_run", "why_first", "young_interval", "zero_memory",
]  # fmt: skip
