"""The picture of flash attention: the tiles that a real run computed."""

from unittest import mock

import torch

from xtrain.context_parallel import flash, flash_attention_forward

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, rect, text

WIDTH, LENGTH, FAR = 400, 1100, 1 << 20


def tiles() -> list[list[int]]:
    """[first query, queries, first key, keys] of every tile of a causal forward.

    A score tells its place: it is the key times FAR plus the query.
    """
    index = torch.arange(LENGTH, dtype=torch.float64)
    one = torch.ones_like(index)
    q = torch.stack([index, one], -1)[None, None]
    k = torch.stack([one, index * FAR], -1)[None, None]
    found: list[list[int]] = []
    softmax_block = flash.softmax_block

    def noted(scores, values, *more):
        rows, columns = scores.shape[-2:]
        key, query = divmod(int(scores[..., -1, 0].item()), FAR)
        found.append([query + 1 - rows, rows, key, columns])
        return softmax_block(scores, values, *more)

    with mock.patch.object(flash, "softmax_block", noted):
        flash_attention_forward(q, k, q, True, 1.0)
    return found


@REGISTRY
def flash_tiles() -> str:
    """The matrix of scores in tiles: computed in which order, or skipped."""
    found = runs.remembered(tiles, 1)[0]
    order = {tuple(tile): number for number, tile in enumerate(found, 1)}
    edges = sorted({(row, rows) for row, rows, _, _ in found})
    left, top = 72.0, 52.0
    scale = (WIDTH - left - 8) / LENGTH
    parts = [
        text(left, 18, "keys of a tile", "xt-label"),
        text(6, 18, "queries", "xt-label"),
    ]
    for start, size in edges:
        middle = (start + size / 2) * scale
        name = f"{start}" if size * scale > 30 else ""
        parts.append(text(left + middle, top - 10, name, "xt-tick", "middle"))
        parts.append(text(left - 8, top + middle + 4, str(start), "xt-tick", "end"))
    for row, rows in edges:
        for key, keys in edges:
            box = (left + key * scale + 1, top + row * scale + 1, keys * scale - 2,
                   rows * scale - 2)  # fmt: skip
            number = order.get((row, rows, key, keys))
            if number is None:
                parts.append(rect(*box, None))
            else:
                parts += cell(*box, int(key == row), str(number), low=5, opacity=0.4,
                              radius=0)  # fmt: skip
    title = "Tiles of a causal matrix of scores, numbered in the order of the run"
    words = f"{len(order)} tiles of {len(edges) ** 2} were computed"
    height = int(top + LENGTH * scale + 8)
    return document(WIDTH, height, parts, title, words)
