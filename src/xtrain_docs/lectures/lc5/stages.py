"""Stages: which parts of one model each rank holds, and what they cost."""

from functools import cache
from typing import Any

import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.stages import part_costs
from xtrain.pipeline_parallel import balanced_cut
from xtrain.plan import ModelShape
from xtrain.schedules import SCHEDULES, Timeline, simulate

from ... import runs
from ...figures import REGISTRY
from ...svg import document, line, rect, text
from ...values import value
from .common import TITLES

PRESET, RANKS = "llama-3-8b", 4
PLACEMENTS = {
    "one_f_one_b": "one stage a rank",
    "interleaved": "loop, two chunks a rank",
    "zb_v": "V, two chunks a rank",
    "dualpipe": "mirror, every stage twice",
}
WIDTH, AT, EMBEDDING = 400, 52, 5
Held = list[list[dict[str, Any]]]


def stages_held(schedule: str) -> list[dict[str, Any]]:
    """On every rank: its virtual stages, made but not filled."""
    ranks = dist.get_world_size()
    mesh = init_mesh((ranks,), ("pipeline",))
    made = SCHEDULES[schedule](ranks, 2 * ranks)
    config = XtrainConfig.preset(PRESET)
    return [
        {
            "stage": stage.index,
            "parts": [stage.module.parts.start, stage.module.parts.stop],
            "parameters": sum(p.numel() for p in stage.parameters()),
        }
        for stage in XtrainModel.stages(config, mesh, made, device="meta")
    ]


def held(schedule: str) -> Held:
    """Of each rank the stages that it has made."""
    return runs.remembered(stages_held, RANKS, schedule)


@cache
def costs(preset: str = PRESET) -> list[int]:
    """Of the parts of the decoder, by number."""
    return part_costs(XtrainConfig.preset(preset))


@REGISTRY
def stages_of_a_model() -> str:
    """Which parts of one model each rank holds, as wide as they cost."""
    parts: list[str] = []
    words, ends = [], edges(costs())
    y = 0.0
    for schedule, title in PLACEMENTS.items():
        name = TITLES[schedule].partition(",")[0]
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
    return document(WIDTH, y, parts, title, "; ".join(words))


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
        gap = 3 if i == stop - 1 else 1  # a gap between two stages side by side
        wide = ends[i + 1] - ends[i] - gap
        boxes.append(rect(ends[i], y, wide, 18, rank, opacity=0.32))
    middle = (ends[first] + ends[stop]) / 2
    return [*boxes, text(middle, y + 13, str(of["stage"]), "xt-tick", "middle")]


@value
def parameters_of_rank(schedule: str, rank: int) -> float:
    """Counted in the modules it has made, as a share of the model's."""
    own = sum(of["parameters"] for of in held(schedule)[rank])
    return own / ModelShape.preset(PRESET).parameters


@value
def flops_of_rank(schedule: str, rank: int) -> float:
    """As a share of a step's: a mirrored stage has half of the micro-batches."""
    own = sum(sum(costs()[slice(*of["parts"])]) for of in held(schedule)[rank])
    return own / sum(costs()) / SCHEDULES[schedule](RANKS, 8).parameter_copies


@value
def head_in_layers(preset: str) -> float:
    """What the head costs, in layers."""
    _, layer, *_, head = costs(preset)
    return head / layer


@value
def cut_and_played(name: str, by_rank: bool) -> Timeline:
    """A step of the model, cut for even stages or even ranks, in units of a layer."""
    schedule, units = SCHEDULES[name](RANKS, 8), costs()
    cut = balanced_cut(units, schedule.stages, schedule.holders if by_rank else None)
    times = [sum(units[part.start : part.stop]) / units[1] for part in cut]
    return simulate(schedule, times, times, times)


@value
def slowest_stage(parts: int, by_layers: bool = False) -> float:
    """Over the mean of all; cut by cost or into as many layers each."""
    cut = balanced_cut(costs(), parts)
    if by_layers:  # the embedding costs nothing, the head goes to the last layers
        of_layers = balanced_cut([1] * (len(costs()) - 2), parts)
        cut = [range(p.start + 1, p.stop + 1) for p in of_layers]
        cut[-1] = range(cut[-1].start, len(costs()))
    slowest = max(sum(costs()[p.start : p.stop]) for p in cut)
    return slowest * parts / sum(costs())
