"""Which cases there are, and which of them do not work.

A case is a wrapper with one feature or two. All are tried and must equal one process,
but for what is declared here. A case that holds a declared one is not tried: it is
refused, or wrong, for that reason already.
"""

from dataclasses import dataclass

from .features import FEATURES, INNER, SCHEDULED

Case = tuple[str, ...]
ZERO, FSDP = ("zero1", "zero2"), ("fsdp", "fsdp_kept")


@dataclass(frozen=True)
class Verdict:
    """What comes of a case: "works", "refused", "wrong" or "untried", and why.

    `because` is the declared case that decides it.
    """

    kind: str
    reason: str = ""
    because: Case = ()


def of_each(wrappers: tuple[str, ...], reasons: dict[str, str]) -> dict[Case, str]:
    """The same reasons for several wrappers."""
    return {(w, feature): why for w in wrappers for feature, why in reasons.items()}


NO_VALUES = "is on the meta device, so there are no values to copy to the other ranks"
OF_MODULE = "reduces the gradients of this module already"
OF_PARAMETERS = "reduces the gradients of these parameters already"
AROUND_MODULES = {
    **{f"around_{inner}": OF_MODULE for inner in ("naive", "ddp", "fsdp", "torch")},
    "around_zero1": OF_PARAMETERS,
}

CUT_IN_FP16 = {
    (wrapper, cut, "grad_scaler"): "need a GradScaler that asks all tensor ranks"
    for wrapper in ("naive", "ddp", *ZERO, *FSDP)
    for cut in ("tensor", "sequence_parallel")
}

IN_STAGES = {
    **{
        ("naive", name): "NaiveDataParallel has no no_sync()"
        for name in ("pipeline", *SCHEDULED)
    },
    **{
        (wrapper, "pipeline", "tied"): "its wrapper holds a shard of that"
        for wrapper in FSDP
    },
    **{
        (wrapper, "pipeline", "grad_scaler"): "need a GradScaler that asks all ranks"
        for wrapper in ("ddp", *ZERO, *FSDP)
    },
}

REFUSED: dict[Case, str] = {
    **CUT_IN_FP16,
    **IN_STAGES,
    **of_each(("naive", "ddp", *FSDP), AROUND_MODULES),
    **of_each(("naive", "ddp", *ZERO), {"meta": NO_VALUES}),
    **of_each(
        ("naive",),
        {
            "no_sync": "'NaiveDataParallel' object has no attribute 'no_sync'",
            "reduce_gradients": "'NaiveDataParallel' object has no attribute 'no_sync'",
            "ring": "got an unexpected keyword argument 'collectives'",
        },
    ),
    **of_each(
        ("naive", "ddp", *FSDP),
        {"offload": "got an unexpected keyword argument 'offload'"},
    ),
    **of_each(("naive", *ZERO, *FSDP), {"join": "object has no attribute 'join'"}),
    **of_each(
        ZERO,
        {
            "around_ddp": OF_PARAMETERS,
            "around_zero1": OF_PARAMETERS,
            "around_fsdp": OF_PARAMETERS,
        },
    ),
    ("zero2", "around_torch"): "parameters have a whole gradient again",
    ("ddp", "interleaved", "join"): "a second forward before the backward of the first",
}
"""What raises on every rank, and words of its error."""

WRONG: dict[Case, str] = {}
"""What runs and gives other weights than one process, and what to do instead."""

BESIDE_STAGES = {
    "bf16", "autocast", "grad_scaler", "recompute", "own_recompute", "clip", "ring",
    "adamw", "tied", "frozen",
}  # fmt: skip
"""What a pipeline is tried with: what does not ask for another loop."""

UNTRIED: dict[Case, str] = {}
"""What is known to end badly, so no test runs it."""


def verdict(case: Case) -> Verdict:
    """What is declared of a case; "works" unless something in it is."""
    declared = {"refused": REFUSED, "wrong": WRONG, "untried": UNTRIED}
    for kind, entries in declared.items():
        for bad, reason in entries.items():
            if set(bad) <= set(case):
                return Verdict(kind, reason, bad)
    return Verdict("works")


def cases(wrapper: str, feature: str) -> list[Case]:
    """A feature with a wrapper, alone and with every later one: what a test runs."""
    later = list(FEATURES)[list(FEATURES).index(feature) + 1 :]
    found = [(wrapper, feature), *((wrapper, feature, other) for other in later)]
    return [case for case in found if is_tried(case)]


def is_tried(case: Case) -> bool:
    """Something that can be combined, and nothing less is declared already."""
    verdict_of = verdict(case)
    names = case[1:]
    return (
        (len(names) == 1 or is_pair(*names))
        and verdict_of.kind != "untried"
        and verdict_of.because in ((), case)
    )


def is_pair(one: str, other: str) -> bool:
    """No two alternatives; a wrapper around a wrapper is tried alone.

    Of pipelines 1F1B alone is tried with others: the runner is the same.
    """
    axes = {FEATURES[one].axis, FEATURES[other].axis}
    if {one, other} & {"pipeline", *SCHEDULED}:  # whose runner has a loop of its own
        return "pipeline" in (one, other) and bool({one, other} & BESIDE_STAGES)
    return len(axes) == 2 and INNER not in axes
