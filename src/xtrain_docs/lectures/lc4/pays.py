"""When tensor parallelism pays: a layer's time by link, and its bytes against ZeRO's.

Everything here is computed by `xtrain.plan` from the sizes of published models and the
rates of published hardware; nothing is measured.
"""

from xtrain.plan import (
    ACCELERATORS,
    LINKS,
    ModelShape,
    bytes_sent,
    collective_traffic,
    hierarchical_time,
    layer_calls,
    layer_flops,
    layer_seconds,
    nccl_hop_seconds,
    tokens_where_equal,
)

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import bytes_, number, percent, seconds, times, value

WIDTH = 400
BF16 = 2
NODE = 8  # devices that NVLink joins in an H100 server
NAMES = {
    "nvlink4": "NVLink 4",
    "pcie5-x16": "PCIe 5 x16",
    "infiniband-ndr": "InfiniBand NDR",
    "ethernet-100g": "100G Ethernet",
}
NETWORKS = ("infiniband-ndr", "ethernet-100g")


def layer_times(
    model: str, tokens: int, ranks: int, link: str, device: str = "h100"
) -> tuple[float, float]:
    """Seconds of one layer, forward and backward: computing, sending."""
    shape, rate = ModelShape.preset(model), ACCELERATORS[device].matmul
    assert rate is not None
    calls = layer_calls(shape, 1, tokens, ranks)
    alpha = nccl_hop_seconds(link in NETWORKS)
    flops = layer_flops(shape, 1, tokens)
    return layer_seconds(calls, flops, ranks, rate, alpha, LINKS[link].bandwidth)


@value
def seconds_if_the_switch_adds(model: str, tokens: int) -> float:
    """Four sums of a layer in 16 bits over NVLink: each element is sent once (NVLS)."""
    size = tokens * ModelShape.preset(model).hidden_size * BF16
    return 4 * (2 * nccl_hop_seconds(False) + size * LINKS["nvlink4"].beta)


@value
def share_of_sums(
    model: str, tokens: int, ranks: int, link: str, switch: bool = False
) -> float:
    """Of a layer's time, when nothing overlaps."""
    work, sums = layer_times(model, tokens, ranks, link)
    if switch:
        sums = seconds_if_the_switch_adds(model, tokens)
    return sums / (sums + work)


def tp_speed(model: str, tokens: int, ranks: int, link: str) -> float:
    """Times as fast as one device, when nothing overlaps."""
    alone = layer_times(model, tokens, 1, link)[0]
    return alone / sum(layer_times(model, tokens, ranks, link))


def tp_speed_on_two_nodes(model: str, tokens: int) -> float:
    """Two nodes' devices, their all-reduce in three steps: inside, across, inside."""
    shape, ranks = ModelShape.preset(model), 2 * NODE
    inside, across = (
        (nccl_hop_seconds(name in NETWORKS), LINKS[name].beta)
        for name in ("nvlink4", "infiniband-ndr")
    )
    sending = sum(
        hierarchical_time(call.numel * call.itemsize, NODE, 2, inside, across)
        for call in layer_calls(shape, 1, tokens, ranks)
    )
    computing = layer_times(model, tokens, ranks, "nvlink4")[0]
    return layer_times(model, tokens, 1, "nvlink4")[0] / (computing + sending)


@TABLES
def tp_two_nodes(
    models: tuple[str, ...] = ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"),
    tokens: int = 4096,
) -> Table:
    """One node, two nodes, and two nodes if NVLink joined all of their devices."""
    rows = []
    for model in models:
        one = tp_speed(model, tokens, NODE, "nvlink4")
        two = tp_speed_on_two_nodes(model, tokens)
        joined = tp_speed(model, tokens, 2 * NODE, "nvlink4")
        rows.append([model, times(one), times(two), percent(two / one - 1),
                     times(joined)])  # fmt: skip
    one_node, two_nodes = f"{NODE} ranks, one node", f"{2 * NODE} ranks, two nodes"
    header = ["model", one_node, two_nodes, "gained", f"{2 * NODE} ranks on NVLink"]
    return Table(header, rows, "lrrrr")


@TABLES
def tp_pays(
    model: str = "llama-3-70b",
    tokens: int = 4096,
    ranks: tuple[int, ...] = (2, 4, 8, 16),
) -> Table:
    """A layer's computing and sending, by number of ranks and link."""
    rows = []
    for count in ranks:
        computing = layer_times(model, tokens, count, "nvlink4")[0]
        row = [str(count), seconds(computing)]
        for link in NAMES:
            sending = layer_times(model, tokens, count, link)[1]
            row.append(
                f"{seconds(sending)} ({times(tp_speed(model, tokens, count, link), 2)})"
            )
        rows.append(row)
    header = ["ranks", "computing", *NAMES.values()]
    return Table(header, rows, "l" + "r" * (1 + len(NAMES)))


@FIGURES
def tp_speeds(model: str = "llama-3-70b", tokens: int = 4096, most: int = 16) -> str:
    """Times as fast as one device over the number of ranks, by link."""
    counts = [2**i for i in range(most.bit_length())]
    lines = {"no communication": [(float(n), float(n)) for n in counts]}
    for link, name in NAMES.items():
        lines[name] = [(float(n), tp_speed(model, tokens, n, link)) for n in counts]
    return line_chart(
        lines,
        Axis("ranks", "log2", lambda n: f"{n:g}"),
        Axis("times as fast as one device", "linear", lambda r: f"{r:g}"),
        f"A layer of {model}, {tokens} tokens, on H100s",
        "Computed. Without overlap of sending and computing.",
        width=WIDTH,
    )


@TABLES
def tp_messages(
    models: tuple[str, ...] = ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"),
    tokens: tuple[int, ...] = (1, 256, 4096),
    ranks: int = 8,
) -> Table:
    """One all-reduce: its bytes, and how much of its time is latency."""
    rows = []
    for model in models:
        shape = ModelShape.preset(model)
        for count in tokens:
            call = layer_calls(shape, 1, count, ranks)[0]
            row = [model if count == tokens[0] else "", number(count)]
            row.append(bytes_(call.numel * call.itemsize))
            for link in ("nvlink4", "infiniband-ndr"):
                alpha, beta = nccl_hop_seconds(link in NETWORKS), LINKS[link].beta
                whole = call.seconds(alpha, beta)
                row += [seconds(whole), percent(call.seconds(alpha, 0) / whole)]
            rows.append(row)
    header = ["model", "tokens", "message", "NVLink 4", "latency", "InfiniBand NDR",
              "latency"]  # fmt: skip
    return Table(header, rows, "lrrrrrr")


def zero_3_bytes(shape: ModelShape, ranks: int) -> int:
    """What stage 3 sends for a layer: two gathers and a scatter of its parameters."""
    half = collective_traffic("ring_all_gather", shape.layer_parameters, ranks)
    return 3 * BF16 * half.max_sent


@TABLES
def tp_or_zero_3(
    models: tuple[str, ...] = (
        "llama-2-7b",
        "llama-3-8b",
        "llama-3-70b",
        "llama-3.1-405b",
    ),
    ranks: int = 8,
) -> Table:
    """Tokens at which both send as many bytes, and the bytes of half and twice that."""
    rows = []
    for model in models:
        shape = ModelShape.preset(model)
        equal = tokens_where_equal(shape)
        sent = [
            bytes_(bytes_sent(layer_calls(shape, 1, round(factor * equal), ranks)))
            for factor in (0.5, 2)
        ]
        rows.append(
            [model, number(shape.hidden_size), bytes_(zero_3_bytes(shape, ranks)),
             number(round(equal)), number(round(equal / ranks)), *sent]
        )  # fmt: skip
    header = ["model", "hidden size", "stage 3 sends", "equal at tokens",
              "for each rank", "TP at half of them", "TP at twice"]  # fmt: skip
    return Table(header, rows, "lrrrrrr")


@FIGURES
def tp_against_zero_3(model: str = "llama-3-70b", ranks: int = 8) -> str:
    """Bytes of a layer that a rank sends, over the tokens of each rank's share."""
    shape = ModelShape.preset(model)
    shares = [2**i for i in range(8, 16)]
    tensor = [(float(n), bytes_sent(layer_calls(shape, 1, n * ranks, ranks)) / 1e9)
              for n in shares]  # fmt: skip
    weights = zero_3_bytes(shape, ranks) / 1e9
    return line_chart(
        {
            "tensor parallel": tensor,
            "ZeRO stage 3": [(float(n), weights) for n in shares],
        },
        Axis("tokens for each rank", "log2", lambda n: f"{n:g}", ticks=shares[::2]),
        Axis("GB sent by a rank", "log", lambda b: f"{b:g}"),
        f"One layer of {model}, {ranks} ranks",
        "Computed: 16-bit weights, gradients and activations, forward and backward.",
        marks=[(tokens_where_equal(shape) / ranks, "equal")],
        width=WIDTH,
    )
