"""The picture and the tables of the page on stages."""

from typing import Any

from xtrain.plan import ModelShape
from xtrain.schedules import SCHEDULES

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .figures import TITLES as NAMES

PRESET, RANKS = "llama-3-8b", 4
PLACEMENTS = (
    ("one_f_one_b", "one stage a rank"),
    ("interleaved", "loop, two chunks a rank"),
    ("zb_v", "V, two chunks a rank"),
    ("dualpipe", "mirror, every stage twice"),
)
WIDTH, AT, EMBEDDING = 400, 52, 5
Held = list[list[dict[str, Any]]]


def held(schedule: str) -> Held:
    """Of each rank the stages that it has made."""
    from .runs_stages import stages_held

    return runs.remembered(stages_held, RANKS, schedule, PRESET)


def costs() -> list[int]:
    """Of the parts of the decoder, by number."""
    from xtrain.model import XtrainConfig
    from xtrain.model.stages import part_costs

    return part_costs(XtrainConfig.preset(PRESET))


@FIGURES
def stages_of_a_model() -> str:
    """Which parts of one model each rank holds, as wide as they cost."""
    parts: list[str] = []
    words, ends = [], edges(costs())
    y = 0.0
    for schedule, title in PLACEMENTS:
        name = NAMES[schedule].partition(",")[0]
        parts.append(text(6, y + 14, f"{name}: {title}", "xt-label"))
        y += 22
        for rank, stages in enumerate(held(schedule)):
            parts.append(text(6, y + 13, f"rank {rank}", "xt-tick"))
            parts.append(line(AT, y + 9, ends[-1], y + 9, "xt-grid"))
            for of in stages:
                parts += stage_box(of, ends, y, rank)
            numbers = " and ".join(f"stage {of['stage']}" for of in stages)
            words.append(f"{name}: rank {rank} holds {numbers}")
            y += 22
        y += 8
    title = "Virtual stages of one model over four ranks"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def edges(costs: list[int]) -> list[float]:
    """Where each part begins, and where the last one ends: in proportion to its cost.

    The embedding costs nothing and is drawn so that it can be seen.
    """
    scale = (WIDTH - 8 - AT - EMBEDDING) / sum(costs)
    ends = [float(AT), float(AT + EMBEDDING)]
    for cost in costs[1:]:
        ends.append(ends[-1] + cost * scale)
    return ends


def stage_box(of: dict[str, Any], ends: list[float], y: float, rank: int) -> list[str]:
    """One stage: its parts side by side, and its number on them."""
    first, stop = of["parts"]
    boxes = []
    for i in range(first, stop):
        gap = 3 if i == stop - 1 else 1  # two stages side by side are told apart
        wide = ends[i + 1] - ends[i] - gap
        boxes.append(rect(ends[i], y, wide, 18, rank, opacity=0.32))
    middle = (ends[first] + ends[stop]) / 2
    return [*boxes, text(middle, y + 13, str(of["stage"]), "xt-tick", "middle")]


@TABLES
def parameters_of_stages(schedule: str) -> Table:
    """Layers, parameters and cost of each rank of one placement, counted."""
    shape, found, each = ModelShape.preset(PRESET), held(schedule), costs()
    copies = SCHEDULES[schedule](RANKS, 2 * RANKS).parameter_copies
    together = sum(of["parameters"] for stages in found for of in stages)
    if together != copies * shape.parameters:
        raise EvidenceError(f"{schedule}: {together}, not {copies} whole models")
    rows = []
    for rank, stages in enumerate(found):
        cost = sum(sum(each[slice(*of["parts"])]) for of in stages)
        own = sum(of["parameters"] for of in stages)
        rows.append(
            [str(rank), "; ".join(named(of, len(each)) for of in stages), count(own),
             f"{100 * own / shape.parameters:.1f} %",
             f"{100 * cost / sum(each) / copies:.1f} %"]
        )  # fmt: skip
    rows.append(["**all**", "", count(together), f"{100 * copies} %", "100.0 %"])
    header = ["rank", "holds", "parameters", "of the model", "of the FLOPs"]
    return Table(header, rows, "rlrrr")


def named(of: dict[str, Any], parts: int) -> str:
    """`stage 0: embedding, layers 0 to 7`, of a model with so many parts."""
    first, stop = of["parts"]
    layers = range(max(first, 1), min(stop, parts - 1))
    words = ["embedding"] if first == 0 else []
    if layers:
        words.append(f"layers {layers[0] - 1} to {layers[-1] - 1}")
    words += ["norm and head"] if stop == parts else []
    return f"stage {of['stage']}: {', '.join(words)}"


@TABLES
def cut_by_layers_or_cost() -> Table:
    """The slowest stage over the mean, cut by the number of layers and by cost."""
    from xtrain.pipeline_parallel import balanced_cut

    each, rows = costs(), []
    for parts in (2, 4, 8, 16):
        mean = sum(each) / parts
        layers = [1] * (len(each) - 2)
        by_layers = [
            sum(each[part.start + 1 : part.stop + 1])
            + (part.stop == len(layers)) * each[-1]
            for part in balanced_cut(layers, parts)
        ]
        by_cost = [
            sum(each[part.start : part.stop]) for part in balanced_cut(each, parts)
        ]
        if max(by_cost) > max(by_layers):
            raise EvidenceError(f"{parts} parts: a cut by cost is slower")
        rows.append(
            [str(parts), f"{max(by_layers) / mean:.3f}", f"{max(by_cost) / mean:.3f}"]
        )
    header = ["stages", "the same number of layers each", "`balanced_cut` by FLOPs"]
    return Table(header, rows, "rrr")


@TABLES
def head_in_layers(presets: str = "llama-2-7b llama-3-8b llama-3-70b") -> Table:
    """What the head costs in layers."""
    from xtrain.model import XtrainConfig
    from xtrain.model.stages import part_costs

    rows = []
    for preset in presets.split():
        _, layer, *_, head = part_costs(XtrainConfig.preset(preset))
        shape = ModelShape.preset(preset)
        rows.append(
            [preset, count(shape.vocab_size), count(shape.hidden_size),
             str(shape.num_hidden_layers), f"{head / layer:.2f}"]
        )  # fmt: skip
    header = ["model", "vocabulary", "hidden size", "layers", "head, in layers"]
    return Table(header, rows, "lrrrr")
