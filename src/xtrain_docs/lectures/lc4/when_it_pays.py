"""When tensor parallelism pays: a layer's time by link, and its bytes against ZeRO's.

Computed by `xtrain.plan` from sizes of published models and rates of hardware.
"""

from xtrain.plan import (
    ACCELERATORS,
    LINKS,
    ModelShape,
    collective_traffic,
    hierarchical_time,
    layer_calls,
    layer_flops,
    layer_seconds,
    nccl_hop_seconds,
)

from ...values import value

BF16 = 2
NODE = 8  # devices that NVLink joins in an H100 server
NETWORKS = ("infiniband-ndr", "ethernet-100g")


@value
def layer_times(
    model: str, tokens: int, ranks: int, link: str = "nvlink4"
) -> tuple[float, float]:
    """Seconds of one layer on H100s, forward and backward: computing, sending."""
    shape, rate = ModelShape.preset(model), ACCELERATORS["h100"].matmul
    assert rate is not None
    calls = layer_calls(shape, 1, tokens, ranks)
    flops = layer_flops(shape, 1, tokens)
    return layer_seconds(calls, flops, ranks, rate, hop(link), LINKS[link].bandwidth)


def hop(link: str) -> float:
    """Seconds of latency of a message."""
    return nccl_hop_seconds(link in NETWORKS)


@value
def seconds_if_the_switch_adds(model: str, tokens: int) -> float:
    """Four sums of a layer in 16 bits over NVLink: each element is sent once (NVLS)."""
    size = tokens * ModelShape.preset(model).hidden_size * BF16
    return 4 * (2 * hop("nvlink4") + size * LINKS["nvlink4"].beta)


@value
def share_of_sums(
    model: str, tokens: int, ranks: int, link: str, switch: bool = False
) -> float:
    """Of a layer's time, when nothing overlaps."""
    work, sums = layer_times(model, tokens, ranks, link)
    if switch:
        sums = seconds_if_the_switch_adds(model, tokens)
    return sums / (sums + work)


@value
def tp_speed(model: str, tokens: int, ranks: int, link: str = "nvlink4") -> float:
    """Times as fast as one device, when nothing overlaps."""
    alone = layer_times(model, tokens, 1)[0]
    return alone / sum(layer_times(model, tokens, ranks, link))


@value
def tp_speed_on_two_nodes(model: str, tokens: int) -> float:
    """Two nodes' devices, their all-reduce in three steps: inside, across, inside."""
    shape, ranks = ModelShape.preset(model), 2 * NODE
    inside, across = (
        (hop(name), LINKS[name].beta) for name in ("nvlink4", "infiniband-ndr")
    )
    sending = sum(
        hierarchical_time(call.numel * call.itemsize, NODE, 2, inside, across)
        for call in layer_calls(shape, 1, tokens, ranks)
    )
    alone, computing = (layer_times(model, tokens, n)[0] for n in (1, ranks))
    return alone / (computing + sending)


@value
def one_sum(model: str, tokens: int, link: str, nbytes: bool = True) -> float:
    """Seconds of one all-reduce on 8 ranks; without its bytes, the latency of it."""
    call = layer_calls(ModelShape.preset(model), 1, tokens, NODE)[0]
    return call.seconds(hop(link), LINKS[link].beta if nbytes else 0)


@value
def zero_3_bytes(model: str, ranks: int) -> int:
    """What stage 3 sends for a layer: two gathers and a scatter of its parameters."""
    numel = ModelShape.preset(model).layer_parameters
    return 3 * BF16 * collective_traffic("ring_all_gather", numel, ranks).max_sent


@value
def tp_bytes(model: str, tokens: float, ranks: int) -> int:
    """What the busiest rank sends for a layer under tensor parallelism."""
    calls = layer_calls(ModelShape.preset(model), 1, round(tokens), ranks)
    return sum(call.traffic.max_sent for call in calls)
