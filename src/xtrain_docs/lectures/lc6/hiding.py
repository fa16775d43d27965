"""How many tokens hide a ring's transfers: real machines, a paper's, and a chart."""

from xtrain.plan import ACCELERATORS, LINKS, Accelerator, hiding_tokens

from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number

MACHINES = (
    ("A100, NVLink 3", "a100-80gb", "nvlink3"),
    ("A100, InfiniBand HDR", "a100-80gb", "infiniband-hdr"),
    ("H100, NVLink 4", "h100", "nvlink4"),
    ("H100, InfiniBand NDR", "h100", "infiniband-ndr"),
    ("B200, NVLink 5", "b200", "nvlink5"),
    ("B200, InfiniBand NDR", "b200", "infiniband-ndr"),
    ("MI300X, one xGMI link", "mi300x", "xgmi-mi300x-peer"),
)


def least_tokens(device: str, link: str, **options: int | bool) -> float:
    """Tokens of a rank at which a ring's transfer is hidden, at the peak rate."""
    flops = Accelerator.preset(device).flops
    return hiding_tokens(flops, LINKS[link].bandwidth, **options)  # type: ignore[arg-type]


@TABLES
def overlap_tokens(ranks: int = 8) -> Table:
    """Least tokens of a rank on real hardware, by the kind of attention and pass."""
    kinds: tuple[dict[str, int | bool], ...] = (
        {},
        {"causal": True},
        {"causal": True, "queries_per_key": 8},
        {"causal": True, "queries_per_key": 8, "backward": True},
    )
    rows = []
    for name, device, link in MACHINES:
        found = [least_tokens(device, link, **kind) for kind in kinds]
        ratio = ACCELERATORS[device].flops / LINKS[link].bandwidth
        if abs(found[0] / ratio - 1) > 1e-9:
            raise EvidenceError(f"{name}: {found[0]}, not F / W = {ratio}")
        sequence = number(round(ranks * max(found[2:]), -2))
        rows.append([name, *(number(round(f)) for f in found), sequence])
    header = ["", "no mask", "causal", "causal, 8 queries a key",
              "the same, backward", f"sequence on {ranks} ranks"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@TABLES
def overlap_published() -> Table:
    """The condition computed for the hardware of the ring attention paper."""
    published = (
        ("A100, NVLink", 312, 300, 1.0, 6.2),
        ("TPU v3", 123, 112, 1.1, 6.6),
        ("TPU v4", 275, 268, 1.0, 6.2),
        ("TPU v5e", 196, 186, 1.1, 6.3),
        ("A100, InfiniBand", 312, 12.5, 24.5, 149.5),
    )
    rows = []
    for name, tera, giga, block, six in published:
        found = hiding_tokens(tera * 1e12, giga * 1e9)
        if abs(6 * found / (six * 1e3) - 1) > 0.01:
            raise EvidenceError(f"{name}: {6 * found}, published {six} thousand")
        rows.append([name, f"{tera:g}", f"{giga:g}", number(round(found)),
                     f"{block:g} thousand", number(round(6 * found)),
                     f"{six:g} thousand"])  # fmt: skip
    header = ["", "TFLOP/s", "GB/s", "block", "published", "6 blocks", "published"]
    return Table(header, rows, "lrrrrrr")


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
