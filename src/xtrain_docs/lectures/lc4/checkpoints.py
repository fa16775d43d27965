"""The page on checkpoints of a cut model: which piece is in whose file."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from xtrain.checkpoint import CheckpointReader
from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.train import save, wrapped_model

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, rect, text

WIDTH, EDGE, RANKS = 400, 36, 4
O_PROJ = "layers.0.self_attn.o_proj.weight"
K_PROJ = "layers.0.self_attn.k_proj.weight"
PANELS = (
    (1, O_PROJ, "o_proj, 4 tensor ranks"),
    (1, K_PROJ, "k_proj, 4 tensor ranks"),
    (2, O_PROJ, "o_proj, FSDP: 2 data x 2 tensor ranks"),
)
CONFIG = XtrainConfig(
    vocab_size=8, hidden_size=5, intermediate_size=4, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=2,
)  # fmt: skip


def saved_pieces(data: int, name: str) -> tuple[list[int], list[list[Any]]]:
    """The shape of a saved tensor, and its pieces: [offset, size, whose file]."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    layout = Layout(data=data, tensor=RANKS // data, zero=3)
    model = wrapped_model(CONFIG, layout)
    path = save(folder[0], 1, model, model.optimizer(torch.optim.SGD))
    with CheckpointReader(path) as reader:
        pieces = [
            [list(box.offset), list(box.size), int(stored.file[5:10])]
            for stored in reader.stored(name)
            for box in stored.boxes
        ]
        shape = list(reader.about(name).shape)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return shape, pieces


@REGISTRY
def checkpoint_boxes() -> str:
    """Elements of full tensors in the colour of the file that has them."""
    parts, words, y = [], [], 30.0
    for rank in range(RANKS):
        x = 6 + 96 * rank
        parts.append(rect(x, 2, 16, 16, rank, opacity=0.32, radius=3))
        parts.append(text(x + 22, 14.5, f"rank {rank}", "xt-tick"))
    for data, name, title in PANELS:
        (rows, columns), pieces = runs.remembered(saved_pieces, RANKS, data, name)[0]
        parts.append(text(6, y + 10, f"{title}, {rows} x {columns}", "xt-label"))
        y += 20
        for number, ((row, column), (high, wide), file) in enumerate(pieces, 1):
            for at in range(high * wide):
                down, right = row + at // wide, column + at % wide
                place = 6 + EDGE * right, y + EDGE * down, EDGE - 3, EDGE - 3
                style = {"cls": "xt-tick", "opacity": 0.32}
                parts += cell(*place, file, str(number), **style)  # type: ignore[arg-type]
        y += EDGE * rows + 14
        files = sorted({file for *_, file in pieces})
        words.append(f"{title}: {len(pieces)} pieces in the files of ranks {files}")
    title = "Pieces of a cut model's tensors"
    return document(WIDTH, y, parts, title, "; ".join(words))
