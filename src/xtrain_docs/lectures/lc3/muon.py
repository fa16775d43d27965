"""The page on Muon: a layer's matrices on ranks of FSDP, and who computes which."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT
from xtrain.zero import FullyShardedDataParallel, Muon

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, text
from .common import WIDTH

SHAPES = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (16, 8),
          "up": (16, 8), "down": (8, 16)}  # fmt: skip
LEFT, RIGHT, HIGH = 54.0, 276.0, 44


def muon_on_shards() -> dict[str, Any]:
    """What this rank holds of the matrices, which it computes, bytes of a step."""
    layer = nn.ParameterDict([(n, torch.zeros(shape)) for n, shape in SHAPES.items()])
    model = FullyShardedDataParallel(layer)
    muon = Muon.of(model, collectives=DIRECT)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with CommLedger() as ledger:
        muon.step()
    mine = [stack.name for stack, r in muon.owners.items() if r == dist.get_rank()]
    held = [(name, piece.numel()) for name, piece in model.named_parameters()]
    return {"held": held, "owned": mine, "sent": ledger.bytes_sent}


@REGISTRY
def muon_picture(ranks: int = 4) -> str:
    """A layer's matrices in flat shards, the owner of each, and what a step sends."""
    found = runs.remembered(muon_on_shards, ranks)
    sizes = {name: rows * columns for name, (rows, columns) in SHAPES.items()}
    per_element = (RIGHT - LEFT) * ranks / sum(sizes.values())
    titles = {LEFT: "holds", RIGHT + 12: "computes", 394.0: "sends"}
    parts = [
        text(x, 16, words, "xt-label", "end" if x > 390 else "start")
        for x, words in titles.items()
    ]
    said = []
    for rank, row in enumerate(found):
        x, y = LEFT, 26.0 + HIGH * rank
        parts.append(text(6, y + 20, f"rank {rank}", "xt-tick"))
        for name, elements in row["held"]:
            if not elements:
                continue
            wide = elements * per_element
            words = name if wide > 8 * len(name) else ""
            hover = f"{elements} of {sizes[name]} elements of {name}"
            strong = 0.6 if name in row["owned"] else 0.2
            colour = list(SHAPES).index(name)
            parts += cell(x, y, wide - 1.5, 32, colour, words, opacity=strong,
                          radius=2, hover=hover)  # fmt: skip
            x += wide
        parts.append(text(RIGHT + 12, y + 20, " ".join(row["owned"]), "xt-label"))
        parts.append(text(394, y + 20, f"{row['sent']} B", "xt-tick", "end"))
        said.append(f"rank {rank} computes {' and '.join(row['owned'])}")
    high = int(30 + HIGH * ranks)
    title = "Matrices in flat shards, and the rank that computes each"
    return document(WIDTH, high, parts, title, "; ".join(said))
