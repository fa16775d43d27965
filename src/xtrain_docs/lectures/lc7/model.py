"""The picture and the table of the page on a whole model with experts."""

import math
from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, bar_chart, fit
from ...tables import REGISTRY as TABLES
from ...tables import Table

LAYOUTS = {
    "one rank": (1, 1, 1),
    "expert 2": (1, 2, 1),
    "expert 4": (1, 4, 1),
    "2 × expert 2": (2, 2, 1),
    "expert 2, tensor 2": (1, 2, 2),
}
"""Sizes of expert_data, expert and tensor."""
KINDS = {
    "embedding, head": "embed_tokens.weight",
    "norms": "layers.0.input_layernorm.weight",
    "attention, q k v": "layers.0.self_attn.q_proj.weight",
    "attention, o": "layers.0.self_attn.o_proj.weight",
    "router": "layers.0.mlp.router.weight",
    "experts, gate and up": "layers.0.mlp.experts.gate_proj",
    "experts, down": "layers.0.mlp.experts.down_proj",
}


def parameters_of(layout: str) -> list[dict[str, dict[str, Any]]]:
    """What each rank holds; EvidenceError unless experts are cut by their two axes."""
    from .runs_model import held

    replicas, expert, tensor = LAYOUTS[layout]
    ranks = math.prod(LAYOUTS[layout])
    every = runs.remembered(held, ranks, replicas, expert, tensor)
    for one in every:
        for name, found in one["parameters"].items():
            whole, mine = math.prod(found["whole"]), math.prod(found["shape"])
            if found["experts"] and mine * expert * tensor != whole:
                raise EvidenceError(f"{layout}, {name}: {mine} of {whole}")
    return [one["parameters"] for one in every]


@FIGURES
def expert_model_shares() -> str:
    """Elements that a rank holds of experts and of everything else, by layout."""
    bars = {}
    for layout in LAYOUTS:
        ranks = [
            [
                sum(math.prod(p["shape"]) for p in one.values() if p["experts"] == kind)
                for kind in (True, False)
            ]
            for one in parameters_of(layout)
        ]
        if any(counts != ranks[0] for counts in ranks):
            raise EvidenceError(f"{layout}: ranks hold {ranks}")
        experts, others = ranks[0]
        bars[layout] = {"experts": float(experts), "all else": float(others)}
    axis = Axis("parameters of a rank", format=lambda n: f"{n / 1000:g} k")
    title = "What a rank holds of a small model with eight experts a layer"
    return fit(bar_chart(bars, axis, title, width=400), 400)


@TABLES
def expert_sums(layout: str = "expert 2, tensor 2") -> Table:
    """Shapes whole and on a rank, and the axes over which gradients are summed."""
    mine = parameters_of(layout)[0]
    rows = []
    for kind, name in KINDS.items():
        found = mine[name]
        right = ["expert_data"] if found["experts"] else ["expert_data", "expert"]
        if found["axes"] != right:
            raise EvidenceError(f"{name} is summed over {found['axes']}")
        shapes = (" × ".join(map(str, found[key])) for key in ("whole", "shape"))
        rows.append([kind, *shapes, ", ".join(f"`{a}`" for a in found["axes"])])
    header = ["parameter", "whole", "on a rank", "summed after backward over"]
    return Table(header, rows, "llll")
