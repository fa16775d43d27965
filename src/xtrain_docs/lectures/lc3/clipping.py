"""The picture of clipping a sharded gradient."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain.zero import clip_sharded_grad_norm_

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, line, rect, text
from .common import WIDTH

HIGH, TOP = 34, 40.0
GRADIENT = [3.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0, 0.0]
COLUMNS = {"gradient": 54, "squares": 124, "all-reduced": 188, "clipped": 306}


def clipped_shard(gradient: list[float], max_norm: float) -> dict[str, Any]:
    """This rank's part of a gradient before and after, and the norm of all."""
    shard = torch.tensor(gradient).chunk(dist.get_world_size())[dist.get_rank()].clone()
    before = shard.tolist()
    norm = clip_sharded_grad_norm_([shard], max_norm).item()
    return {"before": before, "norm": norm, "after": shard.tolist()}


@REGISTRY
def clipping_picture(ranks: int = 4, max_norm: float = 1.3) -> str:
    """Squares of each rank's shard, their sum on every rank, and the clipped shards."""
    found = runs.remembered(clipped_shard, ranks, GRADIENT, max_norm)
    norm = found[0]["norm"]
    factor = min(1.0, max_norm / norm)
    bottom = TOP + HIGH * ranks
    parts = [text(x, 18, words, "xt-label") for words, x in COLUMNS.items()]
    parts.append(rect(188, TOP, 94, bottom - TOP - 8, 0, opacity=0.16, radius=2))
    sums = (f"sum {norm**2:g}", f"norm {norm:g}", f"times {factor:.3g}")
    for row, words in enumerate(sums):
        y = (TOP + bottom) / 2 - 22 + 24 * row
        parts.append(text(235, y, words, "xt-label", "middle"))
    squares = []
    for rank, held in enumerate(found):
        y = TOP + rank * HIGH
        squares.append(f"{sum(value**2 for value in held['before']):g}")
        parts.append(text(6, y + 17, f"rank {rank}", "xt-tick"))
        for x, key, wide, colour in ((54, "before", 28, 1), (306, "after", 42, 2)):
            for place, value in enumerate(held[key]):
                at, words = x + place * (wide + 3), f"{round(value, 3):g}"
                parts += cell(at, y, wide, 26, colour, words, low=4, radius=2)
        parts.append(text(154, y + 17, squares[-1], "xt-value-text", "end"))
        parts.append(line(160, y + 13, 186, y + 13, "xt-axis"))
        parts.append(line(284, y + 13, 304, y + 13, "xt-axis"))
    words = (
        f"{' + '.join(squares)} = {norm**2:g}, so the norm is {norm:g}, the factor "
        f"{factor:.3g}"
    )
    return document(WIDTH, bottom, parts, "Clipping a sharded gradient", words)
