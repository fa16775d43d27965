"""Tables and the chart of the activations that a layer keeps for backward."""

from xtrain.plan import ModelShape, activation_memory

from ... import runs, values
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, bar_chart, fit
from ...tables import REGISTRY as TABLES
from ...tables import Table

WIDTH = 400


def classic_bytes(ranks: int, split: bool, **sizes: int) -> int:
    """Bytes per layer of the formula, and two 16-bit numbers a token of each norm."""
    b, s, h, a = sizes.values()
    norms = 8 * s * b // (ranks if split else 1)
    return int(activation_memory(s, b, h, a, ranks, split)) + norms


def our_bytes(ranks: int, split: bool, **sizes: int) -> int:
    """Bytes of a layer of `XtrainModel` in bf16 on a CPU, eager: see the page."""
    from .runs_activations import INNER, KEY_HEADS

    b, s, h, a = sizes.values()
    tokens = s * b
    norms = tokens * (20 * h + 8)
    cut = tokens * (6 * h + 4 * h * KEY_HEADS // a + 8 * INNER + 4 * a)
    angles = 4 * s * h // a
    return (norms // ranks if split else norms) + cut // ranks + angles


@TABLES
def layer_memory(layer: str = "classic") -> Table:
    """Bytes that a layer keeps on a rank, tensor-parallel and sequence-parallel."""
    from .runs_activations import SIZES, kept_by_classic_layer, kept_by_our_layer

    run, formula = {
        "classic": (kept_by_classic_layer, classic_bytes),
        "ours": (kept_by_our_layer, our_bytes),
    }[layer]
    rows = []
    for ranks in (1, 2, 4):
        cells = []
        for split in (False, True):
            expected = formula(ranks, split, **SIZES)
            found = runs.remembered(run, ranks, split)
            if set(found) != {expected}:
                raise EvidenceError(
                    f"{layer}, {ranks} ranks, split={split}: {found}, not {expected}"
                )
            cells.append(expected)
        rows.append([str(ranks), *map(count, cells), f"{cells[0] / cells[1]:.2f}"])
    header = ["ranks", "tensor-parallel", "and sequence-parallel", "ratio"]
    return Table(header, rows, "rrrr")


@TABLES
def modern_layers(sequence: int = 8192, ranks: int = 8) -> Table:
    """Computed: what a fused layer of known models keeps, bf16, FlashAttention."""
    rows = []
    for name in ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"):
        shape = ModelShape.preset(name)
        h, f = shape.hidden_size, shape.intermediate_size
        share = shape.num_key_value_heads / shape.num_attention_heads
        norms, rest = (
            8 * h,
            4 * h + 4 * h * share + 6 * f + 4 * shape.num_attention_heads,
        )
        sizes = [norms + rest, norms + rest / ranks, (norms + rest) / ranks]
        rows.append([name, *(values.bytes_(sequence * size) for size in sizes)])
    header = ["one sequence, one layer", "whole", f"tensor-parallel, {ranks} ranks",
              "and sequence-parallel"]  # fmt: skip
    return Table(header, rows, "lrrr")


@FIGURES
def layer_memory_bars(layer: str = "classic") -> str:
    """Bytes of activations that a layer keeps, as a share of one device's."""
    table = layer_memory(layer)
    numbers = [
        [int(cell.replace("\u00a0", "")) for cell in row[1:3]] for row in table.rows
    ]
    one = numbers[0][0]
    bars = {
        f"{row[0]} ranks" if row[0] != "1" else "1 rank": {
            "tensor-parallel": tensor / one,
            "and sequence-parallel": both / one,
        }
        for row, (tensor, both) in zip(table.rows, numbers, strict=True)
    }
    chart = bar_chart(
        bars,
        Axis("share of what one device keeps", "linear", lambda n: f"{n:.2f}"),
        "Activations that a layer keeps",
        width=WIDTH,
    )
    return fit(chart, WIDTH)
