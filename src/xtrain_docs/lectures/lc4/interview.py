"""Tables of the errata and the questions of lc4: seconds, from the formulas."""

from xtrain.plan import (
    Accelerator,
    Link,
    ModelShape,
    collective_time,
    collective_traffic,
)

from ...tables import REGISTRY, Table
from ...values import bytes_, percent, seconds

us = 1e-6
LINKS = (
    ("NVLink 4, in a node", 2, "nvlink4"),
    ("NVLink 4, in a node", 8, "nvlink4"),
    ("InfiniBand NDR", 8, "infiniband-ndr"),
    ("InfiniBand NDR", 16, "infiniband-ndr"),
)


def layer_seconds(
    shape: ModelShape, tokens: int, ranks: int, alpha: float, link: str, rate: float
) -> tuple[float, float]:
    """Four all-reduces of a layer in 16 bits; and its matrices at `rate` FLOP/s."""
    size = tokens * shape.hidden_size * 2
    sums = 4 * collective_time(
        "ring_all_reduce", size, ranks, alpha, Link.preset(link).beta
    )
    flops = shape.flops_per_token(tokens) - 6 * shape.vocab_size * shape.hidden_size
    return sums, flops / shape.num_hidden_layers * tokens / ranks / rate


@REGISTRY
def seconds_of_tensor_parallelism(
    model: str = "llama-3-70b", tokens: int = 4096, alpha_us: float = 5
) -> Table:
    """A layer's sums against its computation, by link and number of ranks."""
    shape, rate = ModelShape.preset(model), 0.4 * Accelerator.preset("h100").flops
    rows = []
    for words, ranks, link in LINKS:
        sums, work = layer_seconds(shape, tokens, ranks, alpha_us * us, link, rate)
        rows.append([words, str(ranks), seconds(sums), seconds(work),
                     percent(sums / (sums + work))])  # fmt: skip
    header = ["link", "ranks", "sums", "matrices", "sums' share"]
    return Table(header, rows, "lrrrr")


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
