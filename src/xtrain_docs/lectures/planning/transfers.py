"""What travels in a step by dtype, what hides it, and where other formulas differ."""

from dataclasses import replace
from itertools import pairwise

from xtrain.plan import (
    DTYPES,
    Accelerator,
    Layout,
    Link,
    ModelShape,
    Transfer,
    bytes_sent,
    compute_bound_ranks,
    compute_bound_tokens,
    hiding_tokens,
    hiding_width,
    layer_calls,
    layer_forward_flops,
    padded_vocabulary,
    traffic_per_step,
)
from xtrain.plan.step_traffic import message_size
from xtrain.plan.transfer import SEND

from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, si, value

DENSE, EXPERTS, LARGE = "llama-3-8b", "mixtral-8x7b", "llama-3-70b"
SEQUENCE, BATCH, RANKS = 8192, 8, 8


AXES: tuple[tuple[str, str, str, dict[str, int | bool]], ...] = (
    ("DDP", "sums of gradients", DENSE, {"data": RANKS}),
    ("ZeRO-1", "gradients, weights", DENSE, {"data": RANKS, "zero": 1}),
    ("ZeRO-3, FSDP2", "weights twice, gradients", DENSE, {"data": RANKS, "zero": 3}),
    ("the same, weights kept after forward", "weights, gradients", DENSE,
     {"data": RANKS, "zero": 3, "reshard_after_forward": False}),
    ("tensor", "activations", DENSE, {"tensor": RANKS}),
    ("tensor and sequence", "activations", DENSE,
     {"tensor": RANKS, "sequence_parallel": True}),
    ("context, ring", "keys, values; gradients of them and of weights", DENSE,
     {"context": RANKS}),
    ("pipeline, 1F1B", "activations at one seam", DENSE, {"pipeline": RANKS}),
    ("expert", "copies of tokens; gradients but those of experts", EXPERTS,
     {"data": RANKS, "expert": RANKS}),
)  # fmt: skip


def one_axis(sizes: dict[str, int | bool]) -> Layout:
    """The same batch for all of them."""
    count = BATCH // int(sizes.get("data", 1))
    return Layout(**{"micro_batches": count, **sizes})  # type: ignore[arg-type]


def comm_sent(model: str, sizes: dict[str, int | bool], dtypes: str) -> float:
    """Bytes of the first pipeline rank in a step."""
    sent = traffic_per_step(
        ModelShape.preset(model), one_axis(sizes), SEQUENCE, dtypes=dtypes
    )
    return float(sum(transfer.sent for transfer in sent))


@TABLES
def comm_by_dtype() -> Table:
    """Bytes of a step by parallelism and by the dtypes of what travels."""
    rows = [
        [name, what,
         *(si(comm_sent(model, sizes, dtypes), "B") for dtypes in DTYPES)]
        for name, what, model, sizes in AXES
    ]  # fmt: skip
    header = [f"{RANKS} ranks", "what travels", *(f"`{name}`" for name in DTYPES)]
    return Table(header, rows, "ll" + "r" * len(DTYPES))


@TABLES
def comm_dtypes() -> Table:
    """Bytes of an element of each transfer, by preset."""
    rows = [
        [f"`{name}`", str(one.gradient), str(one.weight), str(one.activation)]
        for name, one in DTYPES.items()
    ]
    return Table(["preset", "gradients", "weights", "activations"], rows, "lrrr")


# ------------------------------------------------------------ what hides what


@TABLES
def comm_hidden() -> Table:
    """What each transfer can hide behind, and from where on it does."""
    device = Accelerator.preset("h100")
    rows = []
    for traffic, behind, condition, found in HIDDEN:
        each = [
            found(device.flops, Link.preset(name).bandwidth)
            for name in ("nvlink4", "infiniband-ndr")
        ]
        rows.append(
            [traffic, behind, condition, *(number(float(f"{v:.3g}")) for v in each)]
        )
    header = ["traffic", "hides behind", "if at least", "NVLink 4", "InfiniBand NDR"]
    return Table(header, rows, "lllrr")


def stage_layers(flops: float, bandwidth: float) -> float:
    """Layers that compute forward for as long as their output travels."""
    shape = ModelShape.preset(LARGE)
    size = message_size(shape, Layout(), SEQUENCE, DTYPES["megatron-bf16"])
    sending = Transfer("pipeline", "activations", SEND, size, 2)
    layer = layer_forward_flops(shape, SEQUENCE, 0)[0] * SEQUENCE / flops
    return sending.seconds(0.0, 1 / bandwidth) / layer


INNER = ModelShape.preset(LARGE).intermediate_size
HIDDEN = (
    ("gradients in fp32, all-reduce", "the last backward", "tokens a device",
     lambda c, w: compute_bound_tokens(c, w, itemsize=4)),
    ("gradients in 16 bit, all-reduce", "the last backward", "tokens a device",
     lambda c, w: compute_bound_tokens(c, w, itemsize=2)),
    ("weights of stage 3, 16 bit", "forward of the layer before", "tokens a device "
     "and micro-batch", compute_bound_tokens),
    ("keys and values of a ring, 8 queries a key", "the block at hand",
     "tokens a context rank",
     lambda c, w: hiding_tokens(c, w, queries_per_key=8, causal=True)),
    ("their gradients in fp32", "the block at hand, backward", "tokens a context rank",
     lambda c, w: hiding_tokens(c, w, queries_per_key=8, causal=True, backward=True)),
    (f"copies of tokens, {RANKS} expert ranks", "products of another micro-batch",
     "width of an expert", lambda c, w: hiding_width(c, w, RANKS)),
    ("activations between stages", "the next micro-batch", "layers a stage",
     stage_layers),
    ("sums of tensor ranks", "nothing: the next product waits",
     f"(equal at so many ranks, inner size {INNER})",
     lambda c, w: compute_bound_ranks(INNER, c, w)),
)  # fmt: skip


TENSOR_RANKS = (2, 4, 8, 16, 32)
TENSOR_RATES = {  # tokens a second and device of a 3B model, nodes of 8 H100, measured
    "tensor": (13_923.18, 12_420.76, 10_903.32, 6_245.6, 2_146.44),
    "tensor and sequence": (14_167.0, 13_460.0, 10_889.0, 6_159.0, 3_610.0),
}


def doubling_drops(name: str) -> list[float]:
    """What each doubling of the tensor ranks takes from a device's throughput."""
    rates = TENSOR_RATES[name]
    return [1 - after / before for before, after in pairwise(rates)]


@TABLES
def comm_tensor_drops() -> Table:
    """Measured throughput by tensor ranks, and what each doubling costs."""
    columns = []
    for name, rates in TENSOR_RATES.items():
        columns.append([number(round(rate)) for rate in rates])
        columns.append(["–", *(percent(-drop) for drop in doubling_drops(name))])
    rows = [
        [str(ranks), *cells]
        for ranks, *cells in zip(TENSOR_RANKS, *columns, strict=True)
    ]
    header = ["tensor ranks", "tensor", "change", "tensor and sequence", "change"]
    return Table(header, rows, "rrrrr")


# ------------------------------------------------- where published formulas differ


@TABLES
def comm_playbook() -> Table:
    """The overlap formulas of the Ultra-Scale Playbook's appendix, and ours."""
    device, link = Accelerator.preset("h100"), Link.preset("infiniband-ndr")
    nvlink, shape = Link.preset("nvlink4"), ModelShape.preset(LARGE)
    slow, fast = device.flops / link.bandwidth, device.flops / nvlink.bandwidth
    tokens, share = SEQUENCE, (RANKS - 1) / RANKS
    data = Transfer("data", "gradients", "ring_all_reduce", 2 * shape.parameters, RANKS)
    backward = 4 * tokens * shape.parameters / device.flops
    square = Transfer("tensor", "sum", "ring_all_gather",
                      2 * tokens * shape.hidden_size, RANKS)  # fmt: skip
    product = 2 * tokens * shape.hidden_size**2 / RANKS / device.flops
    gpt = ModelShape.preset("gpt-3-175b")
    padded = padded_vocabulary(gpt.vocab_size, RANKS)
    gpt = replace(gpt, vocab_size=padded)
    calls = layer_calls(gpt, 1, 2048, RANKS, itemsize=1)
    rows = [
        [f"elements a layer of GPT-3, {RANKS} tensor ranks", r"$8bsh/t$",
         number(8 * 2048 * gpt.hidden_size // RANKS), number(bytes_sent(calls)),
         r"the factor $t-1$"],
        [f"DDP: sending over backward, {tokens} tokens",
         r"$\frac{P}{2T}\frac{n-1}{n}\frac{C}{W}$",
         si(shape.parameters / (2 * tokens) * share * slow),
         number(data.seconds(0.0, link.beta) / backward),
         "$P$ cancels; and two bytes an element, not one"],
        ["tokens that hide weights of stage 3", r"$\frac{n-1}{n}\frac{C}{2W}$",
         number(round(share * slow / 2)),
         number(round(share * compute_bound_tokens(device.flops, link.bandwidth))),
         "two bytes an element, not one"],
        ["TP: one gather over one product of h x h", r"$\frac{t-1}{2h}\frac{C}{W}$",
         number((RANKS - 1) / (2 * shape.hidden_size) * fast),
         number(square.seconds(0.0, nvlink.beta) / product),
         "two bytes an element, not one"],
        ["parameters of a layer, in $h^2$", "16", "16",
         number(shape.layer_parameters / shape.hidden_size**2),
         f"an inner size of {shape.intermediate_size / shape.hidden_size} h, few key "
         "heads"],
    ]  # fmt: skip
    header = ["what", "the formula there", "its value", "ours", "what is missing"]
    return Table(header, rows, "llrrl")


@value
def comm_zero3_over_ddp(zero3: str, ddp: str) -> float:
    """Bytes of stage 3 over those of DDP, each with its dtypes."""
    stage3 = comm_sent(DENSE, {"data": RANKS, "zero": 3}, zero3)
    return stage3 / comm_sent(DENSE, {"data": RANKS}, ddp)


@value
def comm_layer_elements(sequence_parallel: bool) -> float:
    """Elements a layer sends over tensor ranks, in bsh (t-1)/t, without norms."""
    shape = ModelShape.preset(DENSE)
    calls = layer_calls(shape, 1, SEQUENCE, RANKS, itemsize=1,
                        sequence_parallel=sequence_parallel)  # fmt: skip
    blocks = [call for call in calls if call.part != "norm"]
    return bytes_sent(blocks) / (SEQUENCE * shape.hidden_size) * RANKS / (RANKS - 1)
