"""Memory math: what a step holds and when, by recipe, stage and position."""

from xtrain.plan import (
    RECIPES,
    DeviceMemory,
    Layout,
    ModelShape,
    Recipe,
    memory_over_step,
    state_memory,
)

from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rect, swatches, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import digits, number

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

SCALING_BOOK = Recipe("weights and moments", 2, 0, 0, 0, 8)
PLAYBOOK_FIGURES = Recipe("no master", 2, 2, 0, 0, 8)
COUNTED = (
    (SCALING_BOOK, "How to Scale Your Model, for what fits"),
    (PLAYBOOK_FIGURES, "the figures of the Ultra-Scale Playbook"),
    (RECIPES["zero16"], "the ZeRO paper; the text of the Playbook"),
    (RECIPES["fp32"], "everything in fp32; Megatron's table of its optimizer"),
    (RECIPES["megatron18"], "Megatron with bf16; Korthikanti et al.; Machine "
     "Learning Engineering; the default of `xtrain.plan`"),
    (RECIPES["fp32_accum20"], "Megatron with fp16; the Playbook with fp32 "
     "accumulation"),
)  # fmt: skip


@TABLES
def recipe_sources(billions: float = 7) -> Table:
    """Bytes per parameter, which source counts so, and what a model then takes."""
    rows = []
    for recipe, who in COUNTED:
        kept = state_memory(int(billions * 1e9), 1, 0, recipe).total
        name = f"`{recipe.name}`" if recipe.name in RECIPES else recipe.name
        whole = recipe.weight + recipe.gradients
        sizes = (recipe.weight, recipe.gradient, recipe.main_gradient, recipe.master,
                 recipe.moments, recipe.total)  # fmt: skip
        rows.append(
            [name, *map(str, sizes), f"{whole} + {recipe.optimizer}/N",
             digits(kept / 1e9, 4), who]
        )  # fmt: skip
    header = ["recipe", "weights", "gradients", "main gradients", "master", "moments",
              "together", "ZeRO-1", f"{billions:g} B, GB", "who counts so"]  # fmt: skip
    return Table(header, rows, "lrrrrrrrrl")


# -------------------------------------------------------------- stage and position
