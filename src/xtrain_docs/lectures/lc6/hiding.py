"""How many tokens hide a ring's transfers: real machines, a paper's, and a chart."""

from xtrain.plan import LINKS, Accelerator, hiding_tokens

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart


def least_tokens(device: str, link: str, **options: int | bool) -> float:
    """Tokens of a rank at which a ring's transfer is hidden, at the peak rate."""
    flops = Accelerator.preset(device).flops
    return hiding_tokens(flops, LINKS[link].bandwidth, **options)  # type: ignore[arg-type]


@FIGURES
def transfer_over_compute(device: str = "h100", most: int = 65536) -> str:
    """Time of a transfer over that of a block, by the tokens of a rank; forward."""
    counts = [2**i for i in range(8, most.bit_length())]
    lines = {}
    for name, link in (("NVLink 4", "nvlink4"), ("InfiniBand NDR", "infiniband-ndr")):
        for shared, words in ((8, "8 queries a key"), (1, "1 query a key")):
            least = least_tokens(device, link, causal=True, queries_per_key=shared)
            lines[f"{name}, {words}"] = [(float(n), least / n) for n in counts]
    return line_chart(
        lines,
        Axis("tokens of a rank", "log2", lambda n: f"{n:g}", ticks=counts[::2]),
        Axis("transfer over block", "log", lambda r: f"{r:g}"),
        f"What a ring can hide on {device.upper()}",
        "Computed at peak rates. At 1 the transfer takes as long as the block.",
        width=390,
    )
