"""Memory math: what a step holds and when, by recipe, stage and position."""

from xtrain.plan import (
    DeviceMemory,
    Layout,
    ModelShape,
    memory_over_step,
)

from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rect, swatches, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number

GIB = 2**30
DENSE, LARGE = "llama-3-8b", "llama-3-70b"
SEQUENCE = 8192
WIDTH, LEFT, ROW = 400, 112, 24
PARTS = ("weights", "gradients", "main gradients", "master", "moments", "activations",
         "live layer", "logits", "gathered", "root", "update")  # fmt: skip


def phases_of(zero: int, recipe: str, recompute: str) -> dict[str, DeviceMemory]:
    """The example: eight data ranks, two micro-batches of one sequence."""
    layout = Layout(data=8, zero=zero, micro_batches=2, recompute=recompute)
    return memory_over_step(ModelShape.preset(DENSE), layout, SEQUENCE, recipe=recipe)


def parts_of(memory: DeviceMemory) -> dict[str, float]:
    """Bytes by name, as the page writes the names."""
    return {name.replace("_", " "): size for name, size in memory.parts().items()}


@FIGURES
def memory_phases(
    zero: int = 1, recipe: str = "zero16", recompute: str = "full"
) -> str:
    """A bar for each phase of a step, cut by what the bytes are."""
    phases = {p: parts_of(m) for p, m in phases_of(zero, recipe, recompute).items()}
    shown = [name for name in PARTS if any(one[name] for one in phases.values())]
    drawn, row = swatches(shown, apart=36, letter=7.2)
    y = int(row) + 26
    most = max(sum(one.values()) for one in phases.values())
    scale, words = (WIDTH - LEFT - 66) / most, []
    for phase, sizes in phases.items():
        drawn.append(text(LEFT - 8, y + 16, phase, "xt-tick", "end"))
        at = float(LEFT)
        for name in shown:
            wide = sizes[name] * scale
            said = f"{phase}, {name}: {number(sizes[name] / GIB)} GiB"
            if wide:
                colour = shown.index(name)
                drawn.append(rect(at, y + 2, wide, ROW - 5, colour, hover=said))
            at += wide
        total = f"{number(sum(sizes.values()) / GIB)} GiB"
        drawn.append(text(at + 6, y + 16, total, "xt-value-text"))
        words.append(f"{phase} {total}")
        y += ROW
    drawn.append(line(LEFT, y - ROW * len(phases), LEFT, y, "xt-axis"))
    title = f"Memory of a step, ZeRO-{zero}"
    return fit(document(WIDTH, y + 8, drawn, title, "; ".join(words)), WIDTH)


@TABLES
def memory_of_phases(
    zero: int = 3, recipe: str = "zero16", recompute: str = "full"
) -> Table:
    """GiB of each part in each phase."""
    phases = phases_of(zero, recipe, recompute)
    by_part = {name: [parts_of(m)[name] for m in phases.values()] for name in PARTS}
    rows = [
        [name, *(gibibytes(size) for size in sizes)]
        for name, sizes in by_part.items()
        if any(sizes)
    ]
    rows.append(["**together**", *(gibibytes(m.total) for m in phases.values())])
    return Table(["GiB", *phases], rows, "l" + "r" * len(phases))


def gibibytes(size: float) -> str:
    """Two digits behind the dot; nothing is a dash."""
    return f"{size / GIB:.2f}" if size else "–"


# ----------------------------------------------------------------------- recipes

# -------------------------------------------------------------- stage and position
