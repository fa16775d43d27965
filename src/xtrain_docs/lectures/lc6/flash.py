"""Picture and tables of flash attention: tiles, tensors and products of real runs."""

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import bytes_

WIDTH = 400
LENGTHS = (512, 1024, 2048)
TOLERANCE = 1e-12
FLOAT = 4


def computed(length: int, causal: bool = True) -> dict[str, list[list[int]]]:
    """The tiles of a run; EvidenceError unless they are those that the mask leaves.

    Both passes must compute the same tiles, once each.
    """
    from .runs_flash import tiles_computed

    found = runs.remembered(tiles_computed, 1, length, causal)[0]
    edges = sorted({(row, rows) for row, rows, _, _ in found["forward"]})
    right = [
        [row, rows, key, keys]
        for row, rows in edges
        for key, keys in edges
        if not causal or key < row + rows
    ]
    covered = sum(rows for _, rows in edges) == length
    if not covered or found["forward"] != right or sorted(found["backward"]) != right:
        raise EvidenceError(f"{length} tokens, causal={causal}: {found}")
    return found


@FIGURES
def flash_tiles(length: int = 1100) -> str:
    """The matrix of scores in tiles: computed in which order, or skipped."""
    found = computed(length)
    left, top = 72.0, 52.0
    scale = (WIDTH - left - 8) / length
    parts = [
        text(left, 18, "keys of a tile", "xt-label"),
        text(6, 18, "queries", "xt-label"),
    ]
    edges = sorted({(row, rows) for row, rows, _, _ in found["forward"]})
    for start, size in edges:
        middle = (start + size / 2) * scale
        name = f"{start}" if size * scale > 30 else ""
        parts.append(text(left + middle, top - 10, name, "xt-tick", "middle"))
        parts.append(text(left - 8, top + middle + 4, str(start), "xt-tick", "end"))
    order = {tuple(tile): number for number, tile in enumerate(found["forward"], 1)}
    for row, rows in edges:
        for key, keys in edges:
            number = order.get((row, rows, key, keys))
            x, y = left + key * scale + 1, top + row * scale + 1
            wide, high = keys * scale - 2, rows * scale - 2
            if number is None:
                parts.append(rect(x, y, wide, high, None))
                continue
            masked = 1 if key == row else 0
            parts += cell(x, y, wide, high, masked, str(number), low=5, opacity=0.4,
                          radius=0)  # fmt: skip
    title = "Tiles of a causal matrix of scores, numbered in the order of the run"
    words = f"{len(order)} tiles of {len(edges) ** 2} were computed"
    height = int(top + length * scale + 8)
    return fit(document(WIDTH, height, parts, title, words), WIDTH)


@TABLES
def flash_tile_counts() -> Table:
    """Tiles computed, causal and not, against all tiles of the matrix."""
    rows = []
    for length in LENGTHS:
        full, causal = (len(computed(length, c)["forward"]) for c in (False, True))
        rows.append([count(length), count(full), count(causal), f"{causal / full:.3f}"])
    header = ["tokens", "tiles without a mask", "causal", "share"]
    return Table(header, rows, "rrrr")


def counted(way: str, length: int) -> tuple[list[int], list[float], int]:
    """Largest tensors, products in those of all scores, bytes kept.

    EvidenceError unless they are what the page says of them.
    """
    from . import runs_flash

    found = runs.remembered(runs_flash.counted, 1, way, length)[0]
    dim = runs_flash.HEAD_DIM
    work = [flops / (2 * length * length * dim) for flops in found["flops"]]
    if way == "tiles":
        tile = tile_size(length)
        most = max(tile * tile, 2 * length * dim)  # keys and values lie together
        share = sum(rows * keys for _, rows, _, keys in computed(length)["forward"])
        share /= length * length
        kept = (4 * length * dim + length) * FLOAT
        right = max(found["largest"]) <= most and found["kept"] == kept
        right = right and work == [2 * share, 5 * share]
    else:
        right = found["largest"][0] == length * length and work == [2, 4]
    if not right:
        raise EvidenceError(f"{way}, {length} tokens: {found}, products {work}")
    return found["largest"], work, found["kept"]


def tile_size(length: int) -> int:
    """Queries of the first tile of a run."""
    return computed(length)["forward"][0][1]


@TABLES
def flash_memory() -> Table:
    """The largest tensor of forward and backward, and what autograd keeps."""
    rows = []
    for length in LENGTHS:
        for way in ("all scores", "tiles"):
            (forward, backward), _, kept = counted(way, length)
            rows.append([count(length) if way == "all scores" else "", way,
                         count(forward), count(backward), bytes_(kept)])  # fmt: skip
    header = ["tokens", "", "largest tensor forward", "and backward", "kept"]
    return Table(header, rows, "rlrrr")


@TABLES
def flash_products() -> Table:
    """Work of the matrix products, in products of all queries with all keys."""
    rows = []
    for way in ("all scores", "tiles"):
        _, (forward, backward), _ = counted(way, LENGTHS[-1])
        rows.append([way, f"{forward:.2f}", f"{backward:.2f}",
                     f"{backward / forward:.2f}"])  # fmt: skip
    header = ["", "forward", "backward", "backward over forward"]
    return Table(header, rows, "lrrr")


@TABLES
def flash_errors() -> Table:
    """Largest differences from torch's attention and from its kernel, in float64."""
    from .runs_flash import errors

    rows = []
    for heads, key_heads, length in ((4, 4, 256), (4, 2, 300), (3, 1, 600)):
        for causal in (False, True):
            found = runs.remembered(errors, 1, heads, key_heads, length, causal)[0]
            worst = [*found["torch"], max(found["kernel"])]
            if max(worst) > TOLERANCE:
                raise EvidenceError(f"{heads}, {key_heads}, {length}: {found}")
            rows.append([str(heads), str(key_heads), str(length),
                         "causal" if causal else "full",
                         *(f"{error:.0e}" for error in worst)])  # fmt: skip
    header = ["heads", "key heads", "tokens", "", "out", "dQ", "dK", "dV",
              "out and lse, kernel"]  # fmt: skip
    return Table(header, rows, "rrrlrrrrr")
