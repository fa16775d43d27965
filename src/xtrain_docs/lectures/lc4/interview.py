"""Tables of the errata and the questions of lc4: seconds, from the formulas."""

from xtrain.plan import Link, ModelShape, collective_traffic, nccl_hop_seconds

from ...tables import REGISTRY, Table
from ...values import bytes_, percent, seconds, value
from .pays import layer_times

LINKS = (
    ("NVLink 4, in a node", 2, "nvlink4"),
    ("NVLink 4, in a node", 8, "nvlink4"),
    ("InfiniBand NDR", 8, "infiniband-ndr"),
    ("InfiniBand NDR", 16, "infiniband-ndr"),
)


@value
def seconds_if_the_switch_adds(model: str, tokens: int) -> float:
    """Four sums of a layer in 16 bits over NVLink: each element is sent once (NVLS)."""
    size = tokens * ModelShape.preset(model).hidden_size * 2
    return 4 * (2 * nccl_hop_seconds(False) + size * Link.preset("nvlink4").beta)


@REGISTRY
def seconds_of_tensor_parallelism(
    model: str = "llama-3-70b", tokens: int = 4096
) -> Table:
    """A layer's sums against its computation, by link and number of ranks."""
    rows = []
    for words, ranks, link in LINKS:
        work, sums = layer_times(model, tokens, ranks, link)
        switch = ""
        if link == "nvlink4":
            adds = seconds_if_the_switch_adds(model, tokens)
            switch = percent(adds / (adds + work))
        rows.append([words, str(ranks), seconds(sums), seconds(work),
                     percent(sums / (sums + work)), switch])  # fmt: skip
    header = ["link", "ranks", "sums", "matrices", "sums' share",
              "if the switch adds"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@REGISTRY
def tensor_or_pipeline(
    model: str = "llama-3-70b", ranks: int = 8, tokens: int = 4096
) -> Table:
    """What a device sends for one micro-batch under either parallelism; 16 bits."""
    shape = ModelShape.preset(model)
    size = tokens * shape.hidden_size * 2
    reduce = collective_traffic("ring_all_reduce", size, ranks).max_sent
    ways = {
        f"tensor, {ranks} ranks": (4 * shape.num_hidden_layers, reduce),
        f"pipeline, {ranks} stages": (2, size),
    }
    rows = [
        [words, str(times), bytes_(each), bytes_(times * each),
         *(seconds(times * each * Link.preset(link).beta)
           for link in ("nvlink4", "infiniband-ndr"))]
        for words, (times, each) in ways.items()
    ]  # fmt: skip
    header = ["", "times", "each", "together", "over NVLink 4", "over InfiniBand NDR"]
    return Table(header, rows, "lrrrrr")
