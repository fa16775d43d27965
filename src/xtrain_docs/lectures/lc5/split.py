"""The picture and the tables of the page on the split backward."""

from typing import Any

from xtrain.plan import ModelShape, layer_activations

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

WIDTH, LEFT, COLUMN, ROW, TOP = 390, 82, 100, 22, 34
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARTS = {"F": "forward", "B": "input gradients", "W": "weight gradients"}


def sizes() -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of the run's stage."""
    from .runs_split import CONFIG

    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    queries = CONFIG.num_attention_heads * CONFIG.head_dim
    keys = CONFIG.num_key_value_heads * CONFIG.head_dim
    outputs = (queries, keys, keys, hidden, inner, inner, hidden)
    inputs = (hidden, hidden, hidden, queries, hidden, hidden, inner)
    return dict(zip(LINEARS, zip(inputs, outputs, strict=True), strict=True))


def flops_by_part() -> dict[str, dict[str, int]]:
    """FLOPs as run, by part and by whose; EvidenceError unless the formulas'."""
    from .runs_split import BATCH, CONFIG, SEQUENCE, matmuls_by_part

    tokens = BATCH * SEQUENCE
    (found,) = runs.remembered(matmuls_by_part, 1)
    queries = CONFIG.num_attention_heads * CONFIG.head_dim
    summed: dict[str, dict[str, int]] = {}
    for part, matmuls in found.items():
        summed[part] = dict.fromkeys((*LINEARS, "attention"), 0)
        for name, flops in matmuls:
            summed[part][name] += flops
        expected = {name: 2 * tokens * k * o for name, (k, o) in sizes().items()}
        times = {"F": 1, "B": 2, "W": 0}[part]
        expected["attention"] = times * 4 * tokens * SEQUENCE * queries
        if summed[part] != expected:
            raise EvidenceError(f"{part}: {summed[part]}, not {expected}")
    return summed


@FIGURES
def split_matmuls() -> str:
    """Which matmuls of a decoder layer run in which part; a bar for its FLOPs."""
    flops = flops_by_part()
    most = max(max(of_part.values()) for of_part in flops.values())
    parts = []
    for column, (part, words) in enumerate(PARTS.items()):
        x = LEFT + column * COLUMN
        parts.append(text(x, 14, part, "xt-label"))
        parts.append(text(x, 28, words, "xt-tick"))
    for row, name in enumerate((*LINEARS, "attention")):
        y = TOP + row * ROW
        parts.append(text(LEFT - 8, y + 14, name, "xt-tick", "end"))
        for column, part in enumerate(PARTS):
            here = flops[part][name]
            if here:
                x, width = LEFT + column * COLUMN, (COLUMN - 8) * here / most
                hover = f"{name} in {part}: {here:,} FLOPs"
                parts.append(rect(x, y + 3, width, 14, column, radius=2, hover=hover))
    words = (
        "Every linear layer has one bar in each part, all three equally long. "
        "Attention has one in forward, one of twice its length in the input's part, "
        "and none in the weights' part."
    )
    high = TOP + ROW * (len(LINEARS) + 1) + 6
    title = "Matmuls of a decoder layer in the three parts"
    return fit(document(WIDTH, high, parts, title, words), WIDTH)


@TABLES
def split_flops() -> Table:
    """Matmul FLOPs of a decoder layer in F, B and W."""
    flops = flops_by_part()
    rows = []
    for label, names in (("linear layers", LINEARS), ("attention", ("attention",))):
        rows.append([label, *(f"{sum(flops[p][n] for n in names):,}" for p in PARTS)])
    rows.append(["together", *(f"{sum(flops[p].values()):,}" for p in PARTS)])
    return Table(["", *PARTS], rows, "lrrr")


def numbers_until_w(shape: Any) -> int:
    """Elements a token that a layer's weight gradients are computed from: x and dy."""
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return int(
        4 * shape.hidden_size + 2 * (queries + keys) + 3 * shape.intermediate_size
    )


@value
def kept_until_w(preset: str) -> int:
    """Bytes a token between B and W of one layer, in 16 bits."""
    return 2 * numbers_until_w(ModelShape.preset(preset))


@value
def kept_until_b(preset: str) -> float:
    """Bytes a token between F and B of one layer with fused kernels, in 16 bits."""
    kept = layer_activations(ModelShape.preset(preset), 1)
    return kept.total - kept.statistics


@TABLES
def split_kept() -> Table:
    """Bytes of activations that a layer keeps after F, after B and after W."""
    from .runs_split import BATCH, CONFIG, SEQUENCE, bytes_kept

    (found,) = runs.remembered(bytes_kept, 1)
    formula = numbers_until_w(CONFIG) * BATCH * SEQUENCE * runs.ITEMSIZE
    if found["B"] != formula or found["W"] or not found["F"] > formula:
        raise EvidenceError(f"kept {found}, the formula says {formula} after B")
    rows = [
        ["after F, for B and W", f"{found['F']:,}", ""],
        ["after B, for W", f"{found['B']:,}", f"{formula:,}"],
        ["after W", f"{found['W']:,}", "0"],
    ]
    return Table(["activations kept", "measured, bytes", "formula"], rows, "lrr")


@TABLES
def split_counts() -> Table:
    """Matmuls of a backward in one piece, by torch's walk of the graph, and by ours."""
    from .runs_split import matmuls_counted

    rows = []
    for kind in ("plain", "tensor-parallel"):
        (found,) = runs.remembered(matmuls_counted, 1, kind)
        whole, walk, ours = (
            found["one piece"],
            found["torch B"] + found["torch W"],
            found["B"] + found["W"],
        )
        if ours != whole or (walk != whole) != (kind == "tensor-parallel"):
            raise EvidenceError(f"{kind}: {found}")
        rows.append(
            [f"{kind} layers", f"{whole}", f"{found['torch B']} + {found['torch W']}",
             f"{found['B']} + {found['W']}"]
        )  # fmt: skip
    header = ["a decoder layer of", "in one piece", "torch's split", "this split"]
    return Table(header, rows, "lrrr")
