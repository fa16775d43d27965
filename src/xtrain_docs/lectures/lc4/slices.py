"""The picture of which slice of each weight a rank holds."""

from collections.abc import Sequence

from ... import runs
from ...figures import REGISTRY
from ...svg import document, fit, rank_key, rect, text

WIDTH = 400
SCALE, AT = 7, 150  # pixels an element; where the matrices begin


@REGISTRY
def slices_of_a_model(ranks: int = 4) -> str:
    """Every weight of a tiny model as a matrix, coloured by the rank that holds it."""
    from .runs_model import slices_held

    found = runs.remembered(slices_held, ranks)
    parts, y, words = rank_key(ranks), 30.0, []
    for name in found[0]:
        *shape, _, _, _ = found[0][name]
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        owners = [one[name][-2:] for one in found]
        parts.append(text(AT - 10, y + 12, short(name), "xt-tick", "end"))
        for rank, (low, end) in enumerate(owners):
            among = [r for r, held in enumerate(owners) if held == [low, end]]
            parts.append(held_slice(y, (rows, columns), found[rank][name], rank, among))
        distinct = len({tuple(held) for held in owners})
        said = holding(distinct, ranks)
        parts.append(text(AT + columns * SCALE + 10, y + 12, said, "xt-tick"))
        words.append(f"{short(name)}: {said}")
        y += max(rows * SCALE, 14) + 10
    title = "Which slice of each weight a rank holds"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def holding(distinct: int, ranks: int) -> str:
    """How many ranks hold the same."""
    if distinct == ranks:
        return "a slice each"
    return "whole on all" if distinct == 1 else f"{ranks // distinct} hold the same"


def held_slice(
    y: float, size: tuple[int, int], held: Sequence[int], rank: int, among: list[int]
) -> str:
    """A rank's box; of what several hold, each colours its part of the width."""
    *shape, dim, low, end = held
    rows, columns = size
    top, bottom, left, right = 0, rows, 0, columns
    if len(shape) == 1 or dim == 1:
        left, right = low, end
    else:
        top, bottom = low, end
    part = (right - left) * SCALE / len(among)
    return rect(
        AT + left * SCALE + among.index(rank) * part,
        y + top * SCALE,
        part - 1,
        (bottom - top) * SCALE - 1,
        rank,
    )


def short(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`; a norm as it is called."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return {"input_layernorm": "input norm", "post_attention_layernorm": "second norm",
            "norm": "last norm"}.get(layer, layer)  # fmt: skip
