"""Drills in the reader's browser: the entry that a page's worker calls.

    start()                          once: the stand-in for torch comes on the path
    answer(name, source, ranks)      JSON: the verdict, and the messages drawn

The cases, the known mistakes and the words are those of `xtrain drill check`; only the
ranks and the tensors are others. What needs gradients or large products is not here.
"""

import json
import sys
import time
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
    "expert_capacity", "plan_placement", "dispatch", "combine",
    "moe_forward", "overlapped_all_to_all",
)  # fmt: skip
"""The drills that a page checks."""
STAND_IN = Path(__file__).parent / "stand_in"


def start() -> None:
    """Put the stand-in for torch on the path, and load what checks."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    import xtrain.practice.cases  # noqa: F401


def answer(name: str, source: str, ranks: int = 4) -> str:
    """What is right or wrong with a file, and its messages on some ranks, as JSON."""
    began = time.perf_counter()
    verdict, lines = checked(name, source)
    return json.dumps(
        {
            "right": verdict.right,
            "words": verdict.words,
            "mistake": verdict.mistake,
            "lines": lines,
            "seconds": time.perf_counter() - began,
        }
    )


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
    found = outcomes_of(name, source)
    wrong = verdict(drill, found, known(name, drill.solution))
    if not wrong.right:
        wrong = explained(
            drill, source, found, wrong, lambda text: known(name, text)
        )
    return wrong, lines_in(wrong.words)


@lru_cache(maxsize=64)
def known(name: str, source: str) -> Any:
    """Outcomes of a file that does not change: the solution, with a mistake or not."""
    from xtrain.practice.cases import outcomes_of

    return outcomes_of(name, source)


def lines_in(words: str) -> list[int]:
    """The lines of the file that a verdict names."""
    import re

    found = re.findall(r"\blines? (\d+)", words, re.IGNORECASE)
    return sorted({int(line) for line in found})
