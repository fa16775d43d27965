"""The page on the whole model: which slice of each weight a rank holds."""

from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.parameters import placement_of

from ...figures import REGISTRY
from ...svg import document, rank_key, rect, text

WIDTH, RANKS = 400, 4
SCALE, AT = 7, 150  # pixels an element; where the matrices begin
TINY = XtrainConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=2,
)  # fmt: skip
Slice = tuple[int, int, int]  # a dim, and the range of it that a rank holds


def slices() -> list[tuple[str, list[int], list[Slice]]]:
    """The name of each weight of TINY, its shape, and the slices by rank."""
    found = []
    for name, weight in XtrainModel(TINY, device="meta").named_parameters():
        places = [placement_of(name, TINY, rank, RANKS) for rank in range(RANKS)]
        sizes = [(p, weight.shape[p.dim] // p.count) for p in places]
        held = [(p.dim, p.index * n, (p.index + 1) * n) for p, n in sizes]
        found.append((short(name), list(weight.shape), held))
    return found


def short(name: str) -> str:
    """`q_proj` of `layers.0.self_attn.q_proj.weight`; a norm as it is called."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return {"input_layernorm": "input norm", "post_attention_layernorm": "second norm",
            "norm": "last norm"}.get(layer, layer)  # fmt: skip


@REGISTRY
def slices_of_a_model() -> str:
    """Every weight as a matrix, coloured by the ranks that hold it."""
    parts, y, words = rank_key(RANKS), 30.0, []
    for name, shape, held in slices():
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        parts.append(text(AT - 10, y + 12, name, "xt-tick", "end"))
        for rank, (dim, low, end) in enumerate(held):
            box = [0, 0, columns, rows]
            across = len(shape) == 1 or dim == 1
            box[0 if across else 1], box[2 if across else 3] = low, end
            among = [r for r, other in enumerate(held) if other == held[rank]]
            left, top, right, bottom = (n * SCALE for n in box)
            part = (right - left) / len(among)
            x = AT + left + among.index(rank) * part
            parts.append(rect(x, y + top, part - 1, bottom - top - 1, rank))
        distinct = len(set(held))
        said = "whole on all" if distinct == 1 else f"{RANKS // distinct} hold the same"
        said = "a slice each" if distinct == RANKS else said
        parts.append(text(AT + columns * SCALE + 10, y + 12, said, "xt-tick"))
        words.append(f"{name}: {said}")
        y += max(rows * SCALE, 14) + 10
    title = "Which slice of each weight a rank holds"
    return document(WIDTH, y, parts, title, "; ".join(words))
