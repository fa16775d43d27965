"""Which wrappers of a lecture its index page shows beside one process.

What runs is `curve` of the lecture's runs_spine.py; see there what a layout means.
"""

import importlib
from collections.abc import Callable

from ... import runs
from ...figures import REGISTRY as FIGURES
from ...spine.compare import RANKS, Row, figure_of, table_of
from ...spine.reference import Curve, reference
from ...tables import REGISTRY as TABLES
from ...tables import Table

FOUR = (4,)
WRAPPERS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "lc2": [
        ("naive", "naive", RANKS),
        ("DDP", "ddp", RANKS),
        ("DDP, two micro-batches", "no_sync", RANKS),
    ],
    "lc3": [
        ("ZeRO-1", "1", RANKS),
        ("ZeRO-2", "2", RANKS),
        ("ZeRO-3", "3", RANKS),
        ("ZeRO-3 in bfloat16", "3 bf16", RANKS),
    ],
    "lc4": [
        ("tensor", "tensor", RANKS),
        ("tensor and sequence", "sequence", RANKS),
        ("data × tensor, DDP", "ddp", FOUR),
        ("data × tensor, ZeRO-1", "zero 1", FOUR),
        ("data × tensor, FSDP", "fsdp", FOUR),
    ],
    "lc5": [
        ("1F1B", "one_f_one_b", RANKS),
        ("ZB-H1", "zb_h1", RANKS),
        ("1F1B × data, DDP", "ddp one_f_one_b", FOUR),
        ("ZB-V × data, ZeRO-2", "zero 2 zb_v", FOUR),
        ("interleaved × data, FSDP", "fsdp interleaved", FOUR),
    ],
    "lc6": [
        ("ring, zigzag", "ring", RANKS),
        ("Ulysses", "ulysses", RANKS),
        ("all-gather, zigzag", "all_gather", RANKS),
        ("ring × tensor", "tensor", FOUR),
        ("data × ring, FSDP", "fsdp", FOUR),
    ],
    "lc7": [
        ("experts on all ranks", "expert", RANKS),
        ("expert_data × expert", "replicas", FOUR),
        ("the same, FSDP", "fsdp", FOUR),
        ("expert × tensor", "tensor", FOUR),
    ],
}
"""By lecture: what figure and table call it, the layout, on how many ranks."""


def rows(lecture: str) -> list[Row]:
    """The wrappers, in the order of the lecture."""
    run = curve_of(lecture)
    right = with_experts if lecture == "lc7" else reference
    return [
        Row(name, run, layout, ranks, right)
        for name, layout, ranks in WRAPPERS[lecture]
    ]


def curve_of(lecture: str) -> Callable[[str], Curve]:
    """What runs on every rank; it imports torch, so only when a page is drawn."""
    module = f"xtrain_docs.lectures.{lecture}.runs_spine"
    return importlib.import_module(module).curve


def with_experts() -> Curve:
    """One process with all experts: other weights, so another curve; a kept run."""
    return runs.remembered(curve_of("lc7"), 1, "one process")[0]


@FIGURES
def spine(lecture: str) -> str:
    """The loss of one process, and that of each wrapper of four ranks on it."""
    return figure_of(rows(lecture), 4)


@TABLES
def spine_differences(lecture: str) -> Table:
    """How far each wrapper is from one process."""
    return table_of(rows(lecture))
