"""Pictures of lc2 in lanes: steps, micro-batches and buckets, one after another."""

from collections.abc import Sequence

from ... import runs
from ...evidence import count
from ...figures import REGISTRY
from .drawing import Box, lanes


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
