"""Pictures of lc3 that show single numbers of a run: shards, clipping, Adam."""

from collections.abc import Sequence
from typing import Any

from ... import runs, values
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import Axis, document, fit, line, line_chart, text

WIDTH, EDGE = 400, 394
KINDS = {"weights": 0, "gradients": 1, "optimizer state": 2}


def rect(
    x: float, y: float, width: float, height: float, colour: int, opacity: float = 1.0
) -> str:
    """A filled box in the colour of a series."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" '
        f'rx="2" class="xt-bar-fill xt-s{colour}" fill-opacity="{opacity}"/>'
    )


def outline(x: float, y: float, width: float, height: float) -> str:
    """An empty box."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" '
        f'rx="2" class="xt-axis" fill="none"/>'
    )


# ----------------------------------------------------------- who holds what


@REGISTRY
def zero_parts(stages: str | int = "1 2", ranks: int = 4) -> str:
    """Which elements of the model each rank holds at the end of backward."""
    from .runs import parameters_of_tower
    from .runs_timeline import parts_held

    found = {s: runs.remembered(parts_held, ranks, s) for s in str(stages).split()}
    return parts_chart(found, parameters_of_tower())


def parts_chart(found: dict[str, list[dict[str, list[list[int]]]]], total: int) -> str:
    """Ranges of elements by stage, rank and kind, in strips of the whole model."""
    left, strip = 56, 9
    scale = (EDGE - left) / total
    parts: list[str] = []
    x = 6.0
    for kind, colour in KINDS.items():
        parts += [rect(x, 4, 12, 12, colour), text(x + 18, 14.5, kind, "xt-tick")]
        x += 40 + 7 * len(kind)
    y, words = 28.0, []
    for stage, of_ranks in found.items():
        if len(found) > 1:
            parts.append(text(6, y + 10, f"stage {stage}", "xt-label"))
            y += 18
        for rank, held in enumerate(of_ranks):
            parts.append(text(left - 8, y + 18, f"rank {rank}", "xt-tick", "end"))
            for kind, colour in KINDS.items():
                parts.append(outline(left, y, EDGE - left, strip - 1))
                for start, stop in held[kind]:
                    width = (stop - start) * scale
                    parts.append(
                        rect(left + start * scale, y, width, strip - 1, colour)
                    )
                y += strip
            y += 8
        shares = {k: sum(b - a for a, b in of_ranks[0][k]) / total for k in KINDS}
        shown = ", ".join(f"{share:g} of the {kind}" for kind, share in shares.items())
        words.append(f"stage {stage}: each rank holds {shown}")
    drawing = document(WIDTH, int(y), parts, "What each rank holds", "; ".join(words))
    return fit(drawing, WIDTH)


# -------------------------------------------------------------- flat shards


@REGISTRY
def flat_cut(ranks: int = 4) -> str:
    """Three parameters, their flat vector, and the shard of each rank."""
    from .runs_values import SHAPES, flat_shards

    return flat_chart(runs.remembered(flat_shards, ranks), SHAPES)


def flat_chart(found: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> str:
    """What `flat_shards` gives by rank: element i is i, and 0 is padding."""
    owner = {
        round(value): index
        for held in found
        for index, name in enumerate(shapes)
        for value in held["pieces"][name]
    }
    flat = [round(value) for held in found for value in held["shard"]]
    numel = len(owner)
    if flat != [*range(1, numel + 1), *[0] * (len(flat) - numel)]:
        raise EvidenceError(f"the shards end to end are {flat}")
    left, high = 66, 30
    cell = (EDGE - left) / len(flat)

    def cells(row: float, numbers: Sequence[int], first: int) -> list[str]:
        drawn = []
        for place, number in enumerate(numbers, start=first):
            x, y = left + place * cell, row
            if number:
                drawn.append(rect(x, y, cell - 2, high - 8, owner[number], 0.3))
            else:
                drawn.append(outline(x, y, cell - 2, high - 8))
            words = str(number) if number else "0"
            drawn.append(text(x + cell / 2 - 1, y + 15, words, "xt-label", "middle"))
        return drawn

    parts, y = [], 24.0
    for index, (name, shape) in enumerate(shapes.items()):
        mine = [number for number in flat if number and owner[number] == index]
        x = left + (mine[0] - 1) * cell
        parts.append(text(x, y - 8, f"{name} {list(shape)}", "xt-label"))
    parts += [text(6, y + 15, "flat", "xt-label"), *cells(y, flat, 0)]
    y += high + 8
    for rank, held in enumerate(found):
        shard = [round(value) for value in held["shard"]]
        parts.append(text(6, y + 15, f"rank {rank}", "xt-label"))
        parts += cells(y, shard, rank * len(shard))
        y += high
    held_by = [
        f"rank {rank} holds "
        + ", ".join(f"{len(v)} of {k}" for k, v in held["pieces"].items() if v)
        for rank, held in enumerate(found)
    ]
    padding = f"{flat.count(0)} elements of padding at the end"
    drawing = document(WIDTH, int(y), parts, "A flat vector cut into equal shards",
                       "; ".join([*held_by, padding]))  # fmt: skip
    return fit(drawing, WIDTH)


# ----------------------------------------------------------------- clipping

GRADIENT = [3.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0, 0.0]


@REGISTRY
def clipping_picture(ranks: int = 4, max_norm: float = 1.3) -> str:
    """Squares of each rank's shard, their sum on every rank, and the clipped shards."""
    from .runs_values import clipped_shards

    return clipping_chart(
        runs.remembered(clipped_shards, ranks, GRADIENT, max_norm), max_norm
    )


def clipping_chart(found: list[dict[str, Any]], max_norm: float) -> str:
    """What `clipped_shards` gives by rank; EvidenceError unless the sums are sums."""
    total = sum(held["own"] for held in found)
    if {held["summed"] for held in found} != {total}:
        raise EvidenceError(f"squares add up to {total}, ranks have {found}")
    norm = total**0.5
    factor = min(1.0, max_norm / norm)
    high, top, parts = 34, 40.0, []
    columns = {"gradient": 54, "squares": 124, "all-reduced": 188, "clipped": 306}
    for words, x in columns.items():
        parts.append(text(x, 18, words, "xt-label"))
    bottom = top + high * len(found)
    middle = (top + bottom) / 2 - 4
    parts.append(rect(188, top, 94, bottom - top - 8, 0, 0.16))
    for dy, words in ((-22, f"sum {total:g}"), (2, f"norm {norm:g}"),
                      (26, f"times {factor:.3g}")):  # fmt: skip
        parts.append(text(235, middle + dy + 4, words, "xt-label", "middle"))
    for rank, held in enumerate(found):
        y = top + rank * high
        parts.append(text(6, y + 17, f"rank {rank}", "xt-tick"))
        for x, key, wide in ((54, "before", 28), (306, "after", 42)):
            for place, value in enumerate(held[key]):
                at = x + place * (wide + 3)
                parts.append(rect(at, y, wide, 26, 1 if key == "before" else 2, 0.28))
                words = f"{round(value, 3):g}"
                parts.append(text(at + wide / 2, y + 17, words, "xt-label", "middle"))
        parts.append(text(154, y + 17, f"{held['own']:g}", "xt-value-text", "end"))
        parts.append(line(160, y + 13, 186, y + 13, "xt-axis"))
        parts.append(line(284, y + 13, 304, y + 13, "xt-axis"))
    squares = " + ".join(f"{held['own']:g}" for held in found)
    words = f"{squares} = {total:g}, so the norm is {norm:g}, the factor {factor:.3g}"
    drawing = document(WIDTH, int(bottom), parts, "Clipping a sharded gradient", words)
    return fit(drawing, WIDTH)


# ------------------------------------------------------ Adam and mixed precision


@REGISTRY
def adam_moments(steps: int = 30, lr: float = 0.01) -> str:
    """Adam on one weight whose gradient is 1, then -1: its moments and its steps."""
    from .runs_values import adam_steps

    gradients = [1.0] * steps + [-1.0] * steps
    (rows,) = runs.remembered(adam_steps, 1, gradients, lr)
    mean, root, step = (list(column) for column in zip(*rows, strict=True))
    series = {"gradient": gradients, "mean m": mean, "root of v": root,
              "step / rate": step}  # fmt: skip
    words = (
        f"The first mean is {mean[0]:.2g} and the first step {step[0]:.2g} times the "
        f"learning rate; when the gradient turns round, the mean needs "
        f"{sum(m > 0 for m in mean[steps:])} steps to do so"
    )
    return small_multiples(series, "Adam with a gradient that turns round", words)


def small_multiples(series: dict[str, list[float]], title: str, words: str) -> str:
    """One line above the other, each named at its left, all from -1 to 1."""
    left, high = 92, 68
    parts = []
    for row, (name, numbers) in enumerate(series.items()):
        zero = row * high + 34
        wide = (EDGE - left) / (len(numbers) - 1)
        points = " ".join(
            f"{left + i * wide:.1f},{zero - 24 * v:.1f}" for i, v in enumerate(numbers)
        )
        parts.append(text(6, zero + 4, name, "xt-label"))
        for level in (1, 0, -1):
            y = zero - 24 * level
            parts.append(line(left, y, EDGE, y, "xt-axis" if not level else "xt-grid"))
            parts.append(text(left - 6, y + 4, f"{level:g}", "xt-tick", "end"))
        parts.append(f'<polyline points="{points}" class="xt-line xt-s{row}"/>')
    bottom = high * len(series) + 6
    parts.append(text(left, bottom + 12, "step 1", "xt-tick"))
    last = f"step {len(next(iter(series.values())))}"
    parts.append(text(EDGE, bottom + 12, last, "xt-tick", "end"))
    return fit(document(WIDTH, bottom + 20, parts, title, words), WIDTH)


@REGISTRY
def bf16_steps(steps: int = 30, lr: float = 0.001) -> str:
    """A bfloat16 weight that takes small steps, alone and with an fp32 master."""
    from .runs_values import small_steps

    (found,) = runs.remembered(small_steps, 1, steps, lr)
    names = {"alone": "bf16 alone", "with a master": "bf16 with a master",
             "master": "its fp32 master"}  # fmt: skip
    lines = {
        words: [(float(i), value) for i, value in enumerate(found[name], start=1)]
        for name, words in names.items()
    }
    return line_chart(
        lines,
        Axis("steps", "linear", lambda n: f"{n:g}"),
        Axis("weight", "linear", lambda w: f"{w:.2f}", low=1 - 1.1 * steps * lr,
             high=1.0),
        "Small steps of a bf16 weight",
        f"Alone it stays at {found['alone'][-1]:g}; with a master it comes to "
        f"{found['with a master'][-1]:.4g}.",
        width=WIDTH,
    )  # fmt: skip


# -------------------------------------------------------------- checkpoints

HOLDS = {
    ".lock": "jobs that share the folder lock this file",
    "latest": "checksum and name of the newest complete checkpoint",
    "index.json": "every tensor: shape, dtype, and where its pieces lie",
    ".safetensors": "the pieces of one rank",
}


@REGISTRY
def checkpoint_tree(ranks: int = 2) -> str:
    """The files of a saved checkpoint in their folders, with their sizes."""
    from .runs_values import folder_of_checkpoint

    return tree_chart(runs.remembered(folder_of_checkpoint, ranks)[0])


def tree_chart(files: list[tuple[str, int]]) -> str:
    """[path, bytes] of each file, sorted; every folder is named once."""
    parts, y, folder, words = [], 18.0, "", []
    for path, size in files:
        parent, _, name = path.rpartition("/")
        if parent != folder:
            x = 6 + 20 * parent.count("/")
            parts.append(text(x, y, f"{parent.rpartition('/')[2]}/", "xt-value-text"))
            folder, y = parent, y + 22
        x = 26 + 20 * parent.count("/")
        (what,) = (said for end, said in HOLDS.items() if name.endswith(end))
        parts.append(text(x, y, name, "xt-label"))
        parts.append(text(EDGE, y, values.bytes_(size), "xt-label", "end"))
        parts.append(text(x, y + 16, what, "xt-tick"))
        y += 40
        words.append(f"{path}: {what}")
    drawing = document(WIDTH, int(y - 12), parts, "The files of a checkpoint",
                       "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)


# ---------------------------------------------------------------- the model


@REGISTRY
def model_parameters() -> str:
    """Where the parameters of published models lie, in percent: a bar for each."""
    from xtrain.plan import ModelShape

    parts: list[str] = []
    x, left = 6.0, 104
    names = ("attention", "SwiGLU", "embedding, head")
    for index, name in enumerate(names):
        parts += [rect(x, 4, 12, 12, index, 0.4), text(x + 18, 14.5, name, "xt-tick")]
        x += 46 + 7 * len(name)
    y, words = 30.0, []
    for preset in ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b"):
        shape = ModelShape.preset(preset)
        mlp = 3 * shape.hidden_size * shape.intermediate_size
        layers = shape.num_hidden_layers
        norms = 2 * shape.hidden_size
        sizes = [layers * (shape.layer_parameters - mlp - norms), layers * mlp]
        sizes.append(shape.parameters - sum(sizes) - layers * norms)
        parts.append(text(6, y + 17, preset, "xt-tick"))
        at, shares = float(left), []
        for index, size in enumerate(sizes):
            wide = (EDGE - left) * size / sum(sizes)
            parts.append(rect(at, y, wide - 1, 26, index, 0.4))
            share = f"{100 * size / shape.parameters:.0f} %"
            shares.append(f"{share} {names[index]}")
            if wide > 32:
                parts.append(text(at + wide / 2, y + 17, share, "xt-label", "middle"))
            at += wide
        words.append(f"{preset}: {', '.join(shares)}")
        y += 34
    drawing = document(WIDTH, int(y), parts, "Where a model's parameters lie",
                       "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)
