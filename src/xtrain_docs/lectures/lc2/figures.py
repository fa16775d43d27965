"""Figures of the lc2 pages: what ranks compute in a step, and what is reduced."""

from collections.abc import Sequence
from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import document, fit, line, text
from .drawing import WIDTH, Box, Scale, boxed, scales


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
