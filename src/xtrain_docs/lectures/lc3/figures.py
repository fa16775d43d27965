"""Figures of the lc3 pages: memory by stage, and what lives when."""

from ... import runs, values
from ...figures import REGISTRY
from ...svg import Axis, document, fit, line, line_chart, rect, swatches, text

LEFT, WIDTH, ROW = 132, 400, 22
NAMES = ("weights", "gradients", "optimizer state")


@REGISTRY
def zero_picture(ranks: int = 4, bf16: bool = True) -> str:
    """Bytes per rank by stage, formula above measurement, in three colours."""
    from .tables import KINDS, STAGES, bytes_held

    bars: list[tuple[str, str, list[int]]] = []
    for stage in STAGES:
        formula, found = bytes_held(stage, ranks, bf16)
        bars.append(
            (f"stage {stage}", "formula", [getattr(formula, kind) for kind in KINDS])
        )
        bars.append(("", "measured", [found[kind] for kind in KINDS]))
    return stacked(bars, f"Model state of one of {ranks} ranks, by stage")


def stacked(bars: list[tuple[str, str, list[int]]], title: str) -> str:
    """Horizontal bars of several parts: a name, a second name, the parts' bytes."""
    most = max(sum(parts) for *_, parts in bars)
    right = 74
    scale = (WIDTH - LEFT - right) / most
    drawn, _ = swatches(NAMES)
    y = 32.0
    words = []
    for name, kind, parts in bars:
        if name:
            y += 8
            drawn.append(text(6, y + 14.5, name, "xt-label"))
        drawn.append(text(LEFT - 8, y + 14.5, kind, "xt-tick", "end"))
        at = float(LEFT)
        for index, amount in enumerate(parts):
            hover = f"{NAMES[index]}, {kind}: {values.bytes_(amount)}"
            drawn.append(rect(at, y + 2, amount * scale, ROW - 4, index, hover=hover))
            at += amount * scale
        total = values.bytes_(sum(parts))
        drawn.append(text(at + 8, y + 15, total, "xt-value-text"))
        words.append(f"{name or 'the same'}, {kind}: {total}")
        y += ROW
    drawn.append(line(LEFT, 36, LEFT, y + 4, "xt-axis"))
    drawing = document(WIDTH, int(y + 10), drawn, title, "; ".join(words))
    return fit(drawing, WIDTH)


@REGISTRY
def zero_by_ranks(recipe: str = "zero16", most: int = 1024) -> str:
    """Bytes per parameter over the number of ranks, by stage."""
    from xtrain.plan import zero_memory

    counts = [2**i for i in range(most.bit_length())]
    phi = 2**20
    lines = {
        name: [(float(n), zero_memory(phi, n, stage, recipe) / phi) for n in counts]
        for stage, name in enumerate(("data parallel", "stage 1", "stage 2", "stage 3"))
    }
    return line_chart(
        lines,
        Axis("ranks", "log2", lambda n: f"{n:g}"),
        Axis("bytes per parameter", "linear", lambda b: f"{b:g}"),
        "Model state per device",
        "Weights and gradients in 16 bits, Adam in fp32.",
        width=WIDTH,
    )


@REGISTRY
def gradients_alive(cap_kib: float = 144.5) -> str:
    """Whole gradients on a rank while backward goes from last layer to first."""
    from .runs import gradients_alive as run
    from .runs_training import LAYERS, parameters_of_tower

    layer = parameters_of_tower() * runs.ITEMSIZE / LAYERS
    lines = {}
    for stage in ("1", "2"):
        seen = runs.remembered(run, 2, stage, cap_kib)[0]
        lines[f"stage {stage}"] = [
            (float(i), size / layer) for i, size in enumerate(seen, start=1)
        ]
    return line_chart(
        lines,
        Axis("layers whose backward is done", "linear", lambda n: f"{n:g}", low=1),
        Axis("layers with a whole gradient", "linear", lambda n: f"{n:g}", high=LAYERS),
        "Whole gradients that are alive during backward",
        "A bucket holds one layer.",
        width=WIDTH,
    )


@REGISTRY
def weights_alive() -> str:
    """Gathered weights on a rank, layer by layer, forward and backward."""
    from .runs import weights_alive as run
    from .runs_training import LAYERS, parameters_of_tower

    layer = parameters_of_tower() * runs.ITEMSIZE / LAYERS

    names = {"3 kept": "kept after forward", "3": "freed after forward"}
    lines = {}
    for stage, name in names.items():
        seen = runs.remembered(run, 2, stage)[0]
        lines[name] = [(float(i), size / layer) for i, size in enumerate(seen, 1)]
    count = len(lines["freed after forward"])
    whole = float(LAYERS)
    lines = {"stages 0 to 2": [(1.0, whole), (float(count), whole)], **lines}
    return line_chart(
        lines,
        Axis("layers, forward and then backward", "linear", lambda n: f"{n:g}", low=1,
             ticks=list(range(1, count + 1))),
        Axis("whole layers", "linear", lambda n: f"{n:g}", high=LAYERS + 1),
        "Whole weights that are alive during a step",
        "Six layers; the seventh place is the backward of the last one.",
        marks=[(count / 2 + 0.5, "backward")],
        width=WIDTH,
    )  # fmt: skip
