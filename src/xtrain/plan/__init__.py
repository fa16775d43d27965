"""Sizes, bytes and seconds of distributed training, computed without torch.

Standard library only, so the same code runs in a browser's Python.
"""

from xtrain.plan.activations import activation_memory
from xtrain.plan.bubble import pipeline_activations, pipeline_delay, pipeline_idle
from xtrain.plan.context_parallel import (
    context_bytes,
    critical_pairs,
    hiding_tokens,
    ideal_pairs,
    pairs_by_step,
    pairs_of_block,
)
from xtrain.plan.cost import (
    Cost,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
    collective_cost,
    collective_time,
    crossover,
    fastest,
    hierarchical_time,
    nccl_all_reduce_time,
    nccl_hop_seconds,
    nccl_protocol,
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
from xtrain.plan.hardware import ACCELERATORS, LINKS, Accelerator, Link, peak_flops
from xtrain.plan.layer_activations import LayerActivations, layer_activations
from xtrain.plan.layout import (
    Broken,
    Layout,
    broken_rules,
    check_layout,
    layers_of_stage,
    padded_vocabulary,
)
from xtrain.plan.memory import (
    RECIPES,
    Recipe,
    StateMemory,
    state_memory,
    zero_memory,
)
from xtrain.plan.published import GPTShape, LatentShape
from xtrain.plan.search import Rejected, SearchResult, SearchSpace, search
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import (
    DTYPES,
    Transfer,
    TransferDtypes,
    sent_by_axis,
    traffic_per_step,
)
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
    hardware_flops,
    layer_forward_flops,
    model_flops,
    training_days,
    utilization,
)
from xtrain.plan.traffic import (
    Traffic,
    all_reduce_lower_bound,
    chunk_sizes,
    collective_traffic,
    hierarchical_between_nodes,
)

__all__ = [
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
    "device_parameters",
    "estimate",
    "hardware_flops",
    "held_micro_batches",
    "layer_activations",
    "layer_forward_flops",
    "layers_of_stage",
    "memory_over_step",
    "memory_per_device",
    "model_flops",
    "padded_vocabulary",
    "pipeline_delay",
    "pipeline_positions",
    "search",
    "sent_by_axis",
    "traffic_per_step",
    "training_days",
    "utilization",
    "verdict",
]
