"""How a flat vector of three parameters is cut into shards."""

import torch

from xtrain.zero import FlatLayout

from ...figures import REGISTRY
from ...svg import cell, document, text
from .common import EDGE, WIDTH

SHAPES = {"a": (5,), "b": (3,), "c": (2, 3)}


@REGISTRY
def flat_cut(ranks: int = 4) -> str:
    """Three parameters, their flat vector, and the shard of each rank."""
    layout = FlatLayout([torch.Size(shape) for shape in SHAPES.values()], ranks)
    flat = torch.zeros(layout.padded_numel, dtype=torch.int)
    flat[: layout.numel] = torch.arange(1, layout.numel + 1)
    slots, left, y = layout.slots, 66, 24.0
    wide = (EDGE - left) / len(flat)

    def elements(numbers: torch.Tensor, x: float) -> list[str]:
        """A cell for each in its parameter's colour; padding is empty."""
        found = []
        for place, number in enumerate(numbers.tolist()):
            owners = (
                i for i, s in enumerate(layout.slots) if s.start < number <= s.stop
            )
            found += cell(x + place * wide, y, wide - 2, 22, next(owners, None),
                          str(number), low=4, opacity=0.3, radius=2)  # fmt: skip
        return found

    parts, words = [text(6, y + 15, "flat", "xt-label"), *elements(flat, left)], []
    for slot, (name, shape) in zip(slots, SHAPES.items(), strict=True):
        where = left + slot.start * wide
        parts.append(text(where, y - 8, f"{name} {list(shape)}", "xt-label"))
    y += 8
    for rank in range(ranks):
        y += 30
        shard = layout.shard(flat, rank)
        parts.append(text(6, y + 15, f"rank {rank}", "xt-label"))
        parts += elements(shard, left + rank * len(shard) * wide)
        held = zip(SHAPES, layout.pieces(shard, rank), strict=True)
        sizes = [f"{len(piece)} of {name}" for name, piece in held if len(piece)]
        words.append(f"rank {rank} holds {', '.join(sizes)}")
    words.append(f"{layout.padded_numel - layout.numel} elements of padding at the end")
    title = "A flat vector cut into equal shards"
    return document(WIDTH, y + 30, parts, title, "; ".join(words))
