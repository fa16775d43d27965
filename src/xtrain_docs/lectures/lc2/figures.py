"""Figures of the lc2 pages, drawn from real runs."""

from collections.abc import Sequence
from typing import Any

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY
from ...svg import document, fit, line, text
from .drawing import WIDTH, Box, Scale, boxed, lanes, scales


@REGISTRY
def data_parallel_step(ranks: int = 3) -> str:
    """One step from samples to new weights: a column for each rank."""
    from .runs_figures import one_step

    found = runs.remembered(one_step, ranks, 4 * ranks)
    means = {seen["mean"] for seen in found}
    if len(means) > 1 or len({seen["weight"] for seen in found}) > 1:
        raise EvidenceError(f"ranks differ after the step: {found}")
    return step_chart(found)


def step_chart(found: Sequence[dict[str, Any]]) -> str:
    """Boxes of each rank, and one across all ranks where they talk."""
    wide = (WIDTH - 4) / len(found)
    parts: list[str] = []
    for rank, seen in enumerate(found):
        x = 4 + wide * rank
        samples = " ".join(map(str, seen["samples"]))
        above = (f"samples\n{samples}", f"loss\n{seen['loss']:.2f}",
                 f"its gradient\n{seen['own']:.4f}")  # fmt: skip
        below = (f"the mean\n{seen['mean']:.4f}", f"new weight\n{seen['weight']:.4f}")
        parts.append(text(x + wide / 2 - 4, 14, f"rank {rank}", "xt-label", "middle"))
        for row, words in enumerate((*above, None, *below)):
            y = 22 + 52 * row
            if words:
                shade = Box(words, rank if row < 3 else 7)
                parts += boxed(shade, x, y, wide - 8, 38)
            if row < 5:
                middle = x + wide / 2 - 4
                parts.append(line(middle, y + 38, middle, y + 52, "xt-axis"))
    parts += boxed(Box("all-reduce, divided by the ranks", 7), 4, 178, WIDTH - 12, 38)
    words = "; ".join(f"rank {rank}: {seen}" for rank, seen in enumerate(found))
    drawing = document(WIDTH, 330, parts, "One step of data parallelism", words)
    return fit(drawing, WIDTH)


@REGISTRY
def what_differs(ranks: int = 4) -> str:
    """What differs between ranks in a step, and what does not."""
    from .runs_figures import one_step

    found = runs.remembered(one_step, ranks, 4 * ranks)
    rows = {
        "loss: every rank has its own": "loss",
        "gradient of one weight, before the all-reduce": "own",
        "the same gradient, after it": "mean",
        "the weight, after the step": "weight",
    }
    return scales(
        [
            Scale(label, [(str(rank), seen[key]) for rank, seen in enumerate(found)])
            for label, key in rows.items()
        ],
        f"Loss, gradient and weight on {ranks} ranks in one step",
    )


@REGISTRY
def dealt_samples(length: int = 10, ranks: int = 4) -> str:
    """Which rank gets which sample, with padding and with dropping."""
    from .runs_figures import dealt

    padded = runs.remembered(dealt, ranks, length, False)
    dropped = runs.remembered(dealt, ranks, length, True)
    return deal_chart(padded, dropped, length)


def deal_chart(padded: list[list[int]], dropped: list[list[int]], length: int) -> str:
    """Two panels: a sample below its place in the shuffled list, in its rank's row."""
    ranks = len(padded)
    order = in_turn(padded)[:length]
    if (
        sorted(order) != list(range(length))
        or in_turn(dropped) != order[: len(dropped) * len(dropped[0])]
    ):
        raise EvidenceError(f"dealt {padded} and {dropped}, not one permutation")
    parts, y = [], 0.0
    for name, given in (("padded", padded), ("drop_last", dropped)):
        drawn, y = deal_panel(name, in_turn(given), order, ranks, y)
        parts += drawn
    words = (
        f"shuffled: {order}; padded, by rank: {padded}; with drop_last, by rank: "
        f"{dropped}"
    )
    return fit(document(WIDTH, round(y), parts, "Samples dealt to ranks", words), WIDTH)


def in_turn(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """The list that was dealt out: the first of each rank, the second of each, ..."""
    return [index for turn in zip(*by_rank, strict=True) for index in turn]


def deal_panel(
    name: str, given: list[int], order: list[int], ranks: int, y: float
) -> tuple[list[str], float]:
    """The list of the epoch, and below it a row for each rank; and where it ends."""
    left, length = 56, len(order)
    step = (WIDTH - left - 2) / max(length, len(given), -(-length // ranks) * ranks)
    parts = [text(2, y + 16, name, "xt-label")]
    y += 24
    parts.append(text(2, y + 17, "shuffled", "xt-tick"))
    for place in range(max(length, len(given))):
        x = left + step * place
        again, left_out = place >= length, place >= len(given)
        sample = given[place] if not left_out else order[place]
        rank = place % ranks
        empty = again or left_out
        hover = f"sample {sample}: " + ("left out" if left_out else f"to rank {rank}")
        box = Box(str(sample), None if empty else rank, hover)
        parts += boxed(box, x, y, step - 3, 24)
        if not left_out:
            row = y + 32 + 28 * rank
            hover += " once more" if again else ""
            parts += boxed(Box(str(sample), rank, hover), x, row, step - 3, 24)
    for rank in range(ranks):
        parts.append(text(2, y + 32 + 28 * rank + 17, f"rank {rank}", "xt-tick"))
    return parts, y + 32 + 28 * ranks + 12


@REGISTRY
def what_is_reduced() -> str:
    """The gradients of two ranks when nothing, the loss, or the gradient is reduced."""
    from .runs_figures import gradient_by_what_is_reduced

    found = runs.remembered(gradient_by_what_is_reduced, 2)
    names = {"nothing": "nothing is reduced", "loss": "the loss is reduced",
             "gradient": "the gradient is reduced"}  # fmt: skip
    mean = sum(seen["nothing"] for seen in found) / len(found)
    return scales(
        [
            Scale(label, [(str(rank), seen[key]) for rank, seen in enumerate(found)])
            for key, label in names.items()
        ],
        "The gradient on two ranks",
        shared=True,
        mark=(mean, f"one process: {mean:g}"),
    )


@REGISTRY
def weighed_tokens() -> str:
    """Losses of tokens on two ranks, and their mean by three ways."""
    from .runs_figures import weighed

    tokens = [[1.0, 2.0, 3.0], [6.0]]
    found = runs.remembered(weighed, 2, tokens)[0]
    losses = [loss for mine in tokens for loss in mine]
    right = sum(losses) / len(losses)
    if found["sums"] != right:
        raise EvidenceError(f"sums over the count give {found['sums']}, not {right}")
    rows = [
        Scale(f"losses of rank {rank}'s tokens", [(f"{loss:g}", loss) for loss in mine])
        for rank, mine in enumerate(tokens)
    ]
    rows += [
        Scale("mean of the ranks' means", [("m", found["means"])]),
        Scale("sums, divided once by the count of all", [("s", found["sums"])]),
    ]
    mark = (right, f"one process: {right:g}")
    return scales(rows, "Two means of the same tokens", shared=True, mark=mark)


@REGISTRY
def joined_steps(first: int = 2, second: int = 4) -> str:
    """Two ranks with different numbers of batches inside join()."""
    from .runs_figures import joined

    found = runs.remembered(joined, 2, [first, second])
    rows = []
    for rank, steps in enumerate(found):
        boxes = [
            Box(f"batch\n{own:g}", rank, f"a batch of its own, all ranks get {mean:g}")
            if kind == "batch"
            else Box("shadow\n0", None, "takes part with zeros")
            for kind, own, mean in steps
        ]
        rows.append((f"rank {rank}", boxes))
    longest = max(found, key=lambda steps: sum(kind == "batch" for kind, *_ in steps))
    means = [Box(f"{mean:g}", 7) for _, _, mean in longest]
    return lanes([*rows, ("mean", means)], "Steps of two ranks inside join", high=38)


@REGISTRY
def calls_by_micro_batch(micro_batches: int = 4) -> str:
    """Which micro-batches all-reduce, without and with no_sync."""
    from .runs_figures import collectives_by_micro_batch

    rows: list[tuple[str, list[Box | None]]] = []
    for name, quiet in (("always", False), ("no_sync", True)):
        found = runs.remembered(collectives_by_micro_batch, 2, micro_batches, quiet)[0]
        compute: list[Box | None] = []
        send: list[Box | None] = []
        for number, calls in enumerate(found):
            compute.append(Box(f"micro-\nbatch {number}", number))
            hover = f"{len(calls)} all-reduces, {count(sum(calls))} bytes"
            words = f"{len(calls)} calls\n{count(sum(calls))}"
            send.append(Box(words, 7, hover) if calls else None)
        rows += [(name, compute), ("sends", send)]
    return lanes(rows, "All-reduces of a step, by micro-batch", left=60, high=38)


@REGISTRY
def a_bucket_waits(skipped: int = 1) -> str:
    """Backward on two ranks, of which the second one skips a layer."""
    from .runs_figures import a_layer_is_skipped

    found = runs.remembered(a_layer_is_skipped, 2, skipped)
    return lanes(
        [(f"rank {rank}", waiting_boxes(seen)) for rank, seen in enumerate(found)],
        "Backward of two ranks; the second one skips a layer",
        left=48,
        high=40,
    )


def waiting_boxes(seen: Sequence[str]) -> list[Box]:
    """A box an event; a gradient that never came is an empty one."""
    boxes, bucket = [], 0
    missing = set("0123") - {event[-1] for event in seen if event[0] == "g"}
    for event in seen:
        if event.startswith("gradient"):
            boxes.append(Box(f"grad\n{event[-1]}", 0, f"{event} is complete"))
        elif event == "error":
            boxes.append(Box("raise", 1, "RuntimeError"))
        else:
            if bucket == 1 and missing:
                number = missing.pop()
                hover = f"gradient {number} never comes: zeros at the end of backward"
                boxes.append(Box(f"zeros\n{number}", None, hover))
            boxes.append(Box(f"send\nb{bucket}", 2, f"bucket {bucket} leaves"))
            bucket += 1
    return boxes
