"""The picture and the tables of the page on checkpoints of a cut model."""

import math
from typing import Any

from xtrain.plan import RECIPES

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

WIDTH, EDGE = 400, 394
O_PROJ = "layers.0.self_attn.o_proj.weight"
K_PROJ = "layers.0.self_attn.k_proj.weight"
PANELS = (
    (1, O_PROJ, "o_proj, 4 tensor ranks"),
    (1, K_PROJ, "k_proj, 4 tensor ranks"),
    (2, O_PROJ, "o_proj, FSDP: 2 data x 2 tensor ranks"),
)
Pieces = list[list[Any]]  # [offset, size, number of the file]


@FIGURES
def checkpoint_boxes() -> str:
    """Elements of full tensors in the colour of the file that has them."""
    from .runs_checkpoints import saved_pieces

    panels = []
    for data, name, words in PANELS:
        entry = runs.remembered(saved_pieces, 4, data)[0][name]
        panels.append((words, entry["shape"], entry["pieces"]))
    return boxes_chart(panels)


def boxes_chart(panels: list[tuple[str, list[int], Pieces]]) -> str:
    """A grid for each tensor; EvidenceError unless each element is in one piece."""
    parts, words = [], []
    for rank in range(4):
        x = 6 + 96 * rank
        parts.append(rect(x, 2, 16, 16, rank, opacity=0.32, radius=3))
        parts.append(text(x + 22, 14.5, f"rank {rank}", "xt-tick"))
    y, edge = 30.0, 36
    for title, (rows, columns), pieces in panels:
        parts.append(text(6, y + 10, f"{title}, {rows} x {columns}", "xt-label"))
        y += 20
        owners = owners_of(rows, columns, pieces)
        for (row, column), (piece, file) in sorted(owners.items()):
            parts += cell(6 + edge * column, y + edge * row, edge - 3, edge - 3, file,
                          str(piece), cls="xt-tick", opacity=0.32)  # fmt: skip
        y += edge * rows + 14
        files = sorted({file for _, file in owners.values()})
        words.append(f"{title}: {len(pieces)} pieces in the files of ranks {files}")
    drawing = document(
        WIDTH, int(y), parts, "Pieces of a cut model's tensors", "; ".join(words)
    )
    return fit(drawing, WIDTH)


def owners_of(
    rows: int, columns: int, pieces: Pieces
) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, column) of each element -> number of its piece, and of the file."""
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    for number, (offset, size, file) in enumerate(pieces, 1):
        for row in range(offset[0], offset[0] + size[0]):
            for column in range(offset[1], offset[1] + size[1]):
                if (row, column) in owners:
                    raise EvidenceError(f"element {row}, {column} is in two pieces")
                owners[row, column] = number, file
    if len(owners) != rows * columns:
        raise EvidenceError(f"{len(owners)} of {rows * columns} elements are stored")
    return owners


@TABLES
def cut_checkpoint_bytes() -> Table:
    """Bytes of weights and moments that are written, and that the ranks hold."""
    from .runs_checkpoints import held, parameters, saved_pieces

    recipe = RECIPES["fp32"]
    each = recipe.weight + recipe.moments
    (full,) = runs.remembered(parameters, 1)
    rows = []
    for title, ranks, data in (
        ("1 rank", 1, 1),
        ("2 tensor ranks", 2, 1),
        ("4 tensor ranks", 4, 1),
        ("FSDP over 2 data ranks of 2 tensor ranks", 4, 2),
    ):
        index = runs.remembered(saved_pieces, ranks, data)[0]
        pieces = [piece for entry in index.values() for piece in entry["pieces"]]
        written = recipe.weight * sum(math.prod(size) for _, size, _ in pieces)
        if written != full * each:
            raise EvidenceError(f"{title}: {written} bytes, not {full * each}")
        tensor = ranks // data
        there = each * sum(runs.remembered(held, tensor))
        rows.append([title, count(there), count(written), count(len(pieces))])
    header = ["saved by", "held by one tensor group, bytes", "written, bytes", "pieces"]
    return Table(header, rows, "lrrr")


@TABLES
def cut_norms() -> Table:
    """The gradients' norm of one model on 2 and 4 tensor ranks, right and wrong."""
    from .runs_checkpoints import norms

    rows = []
    for ranks in (2, 4):
        found = runs.remembered(norms, ranks)
        right = found[0]["right"]
        if any(abs(of["ours"] / right - 1) > 1e-12 for of in found):
            raise EvidenceError(f"on {ranks} ranks the norm is not {right}: {found}")
        own = [f"{of['own']:.4f}" for of in found]
        rows.append(
            [
                str(ranks),
                f"{right:.4f}",
                f"{found[0]['ours']:.4f}",
                f"{min(own)} to {max(own)}",
                f"{found[0]['replicas']:.4f}",
            ]
        )
    header = ["tensor ranks", "one process", "`clip_grad_norm_`",
              "each rank alone", "replicas counted on every rank"]  # fmt: skip
    return Table(header, rows, "rrrrr")
