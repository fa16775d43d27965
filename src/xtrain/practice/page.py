"""Drills in the reader's browser: the entry that a page's worker calls.

    start()                          once: the stand-in for torch comes on the path
    answer(name, source, ranks)      JSON: the verdict, and the messages drawn

The cases, the known mistakes and the words are those of `xtrain drill check`; only the
ranks and the tensors are others. What needs gradients or large products is not here.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

IN_PAGE = (
    "exchange", "broadcast", "reduce", "gather", "scatter", "ring_reduce_scatter",
    "ring_all_gather", "ring_all_reduce", "tree_all_reduce",
    "halving_doubling_all_reduce", "hierarchical_all_reduce", "one_shot_all_reduce",
    "parameter_server_all_reduce", "all_to_all_single",
    "distributed_sampler",
    "clip_grad_norm",
    "rotary_embedding",
    "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe",
    "dualpipe_v", "chimera", "simulate",
    "online_softmax", "ring_attention_forward", "shard_sequence", "decode_attention",
    "expert_capacity", "update_balance_bias", "plan_placement", "dispatch", "combine",
    "moe_forward", "overlapped_all_to_all",
    "top_k_gradient", "load_balancing_loss",
)  # fmt: skip
"""The drills that a page checks."""
STAND_IN = Path(__file__).parent / "stand_in"


def start() -> None:
    """Put the stand-in for torch on the path, and load what checks."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    import xtrain.practice.cases  # noqa: F401


def answer(name: str, source: str, ranks: int = 4) -> str:
    """What is right or wrong with a file, and what it does on some ranks, as JSON."""
    began = time.perf_counter()
    verdict, lines = checked(name, source)
    run = executed(verdict.words)
    drawing = shown(name, source, ranks) if run else Shown()
    return json.dumps(
        {
            "right": verdict.right,
            "words": verdict.words + drawing.more,
            "mistake": verdict.mistake,
            "lines": lines,
            "title": drawing.title,
            "frames": drawing.frames,
            "messages": drawing.messages,
            "printed": drawing.printed,
            "seconds": time.perf_counter() - began,
        }
    )


def executed(words: str) -> bool:
    """Was the file run, or refused before that?"""
    return not re.match(r"SyntaxError|Line \d+ imports", words)


@dataclass(frozen=True)
class Shown:
    """What a page draws of a file.

    Attributes:
        messages: a table of them.
        printed: by the run that is drawn.
        more: a sentence on buffered sends, for the verdict.
    """

    title: str = ""
    frames: Sequence[str] = ()
    messages: str = ""
    printed: str = ""
    more: str = ""


def shown(name: str, source: str, ranks: int) -> Shown:
    """What the file does on some ranks."""
    from xtrain.practice import drawing
    from xtrain.practice.cases import Drilled
    from xtrain.practice.demos import DEMOS, legend

    try:
        drilled = Drilled(name, source)
    except (Exception, SystemExit):
        return Shown()
    if drilled.folder == "schedules":
        return timeline(name, drilled.load, ranks)
    if name not in DEMOS:
        return Shown()
    sizes = getattr(drilled.checks, "SIZES", {}).get(name, range(1, 9))
    size = max(n for n in sizes if n <= ranks)
    run, more = drawing.drawn(name, drilled.load, size, False), ""
    if run.problem == "Deadlock":
        loose = drawing.drawn(name, drilled.load, size, True)
        if not loose.problem:
            more = "\nIf sends were buffered it would end: do not rely on that."
    title = f"On {size} {'rank' if size == 1 else 'ranks'}"
    title += f" ({ranks} are not a size for it)" * (size != ranks) + legend(name)
    table = drawing.table(name, run) if run.messages else ""
    return Shown(title, drawing.frames(name, run), table, run.printed, more)


def timeline(name: str, load: Callable[[], Any], ranks: int) -> Shown:
    """Of a schedule: drawn as the pages draw theirs."""
    from xtrain.practice.running import alone
    from xtrain.schedules import SCHEDULES, parse_action, render_svg, simulate

    for size in (ranks, ranks - 1):  # some need an even number
        count = 2 * size + size % 2
        try:
            made = SCHEDULES[name](size, count)
            with alone():
                orders = load()(size, count)
            actions = [tuple(map(parse_action, order)) for order in orders]
            picture = render_svg(simulate(replace(made, actions=tuple(actions))))
        except (Exception, SystemExit):
            continue
        box = f'<div class="xd-box" tabindex="0">{picture}</div>'
        return Shown(f"On {size} ranks, {count} micro-batches", [box])
    return Shown()


def checked(name: str, source: str) -> tuple[Any, list[int]]:
    """The verdict on a file, and the lines that it names."""
    from xtrain.practice.cases import outcomes_of
    from xtrain.practice.drills import drill as drill_of
    from xtrain.practice.judging import explained, forbidden
    from xtrain.practice.verdicts import Verdict, verdict

    problem = forbidden(source)
    if problem:
        return Verdict(False, problem), lines_in(problem)
    drill = drill_of(name)
    found = [*outcomes_of(name, source)]
    wrong = verdict(drill, found, known(name, drill.solution))
    if not wrong.right:
        wrong = explained(
            drill, source, found, wrong, lambda text: outcomes_of(name, text)
        )
    return wrong, lines_in(wrong.words)


@lru_cache(maxsize=64)
def known(name: str, source: str) -> Any:
    """Outcomes of a file that does not change: the solution."""
    from xtrain.practice.cases import outcomes_of

    return [*outcomes_of(name, source)]


def lines_in(words: str) -> list[int]:
    """The lines of the file that a verdict names."""
    found = re.findall(r"\blines? (\d+)", words, re.IGNORECASE)
    return sorted({int(line) for line in found})
