"""Sums of 16-bit numbers in the library: where they are, and in what they add up.

A test measures each of them against float64, and fails if one is missing here or there.
"""

from ...tables import REGISTRY, Table

ONCE, PARTS, WIRE = "fp32", "fp32, parts in 16 bits", "the input's"
ROWS = (
    # what is summed, over what, symbol, dtype
    ("gradients", "micro-batches", "comm.main_grad:unround", ONCE),
    ("gradients", "ranks (DDP)", "data_parallel.ddp:DistributedDataParallel", ONCE),
    ("gradients", "ranks (ZeRO)", "zero.stage1:take_shard", ONCE),
    ("gradients", "ranks (FSDP)", "zero.flat_param_group:FlatParamGroup", ONCE),
    ("gradients", "ranks, FSDP's compute_dtype", "zero.fsdp:FullyShardedDataParallel",
     WIRE),
    ("gradients", "ranks, the simplest form", "data_parallel.naive:NaiveDataParallel",
     WIRE),
    ("gradients", "mesh axes", "model.gradient_sums:sum_gradients", ONCE),
    ("gradients", "stages that share", "pipeline_parallel.shared:SharedGradients",
     ONCE),
    ("squares of gradients", "elements, ranks", "zero.clip:clip_sharded_grad_norm_",
     "float64"),
    ("loss", "micro-batches", "pipeline_parallel.step:Step", "float64"),
    ("loss", "vocabulary", "tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
     ONCE),
    ("a tensor", "ranks (ring)", "comm.ring:ring_all_reduce", WIRE),
    ("a tensor", "ranks (tree)", "comm.tree:tree_all_reduce", WIRE),
    ("a tensor", "ranks (halving)", "comm.tree:halving_doubling_all_reduce", WIRE),
    ("a tensor", "ranks (one shot)", "comm.one_shot:one_shot_all_reduce", ONCE),
    ("a tensor", "ranks (direct)", "comm.direct:direct_all_reduce", ONCE),
    ("shares of a tensor", "ranks (shared memory)", "comm.reduce_op:reduce_into", ONCE),
    ("activations", "tensor ranks", "tensor_parallel.functions:row_linear", WIRE),
    ("activations", "tensor ranks, in pieces",
     "tensor_parallel.ring_matmul:ring_matmul_reduce_scatter", WIRE),
    ("weight gradient", "slices of the sequence",
     "tensor_parallel.ring_matmul:add_weight_gradient", PARTS),
    ("gradient of a norm's weight", "slices of the sequence",
     "comm.autograd:identity_all_reduce_wide", ONCE),
    ("gradient of a key weight", "its replicas", "comm.autograd:identity_sum", ONCE),
    ("softmax and its output", "blocks of keys",
     "context_parallel.online_softmax:online_softmax", ONCE),
    ("dK, dV", "blocks of queries, ranks",
     "context_parallel.ring_attention:ring_attention", PARTS),
    ("outputs of experts", "a token's experts",
     "expert_parallel.routing:weighted_sum", ONCE),
    ("gradient of a gate", "features", "expert_parallel.experts:routed_mlp", PARTS),
)  # fmt: skip

BOUNDS = {
    ONCE: "half a last place: rounded once",
    PARTS: "three half last places of the sum of sizes",
    "float64": "none in 16 bits",
    WIRE: "(N-1) half last places of the sum of sizes",
}


@REGISTRY
def sums_in_16_bits() -> Table:
    """Every sum over ranks, micro-batches or the sequence, and its dtype."""
    rows = [[*row[:2], f"`{row[2]}`", row[3], BOUNDS[row[3]]] for row in ROWS]
    header = ["what is summed", "over", "in `xtrain.`", "adds up in", "error at most"]
    return Table(header, rows, "lllll")
