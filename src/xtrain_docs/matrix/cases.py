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
    """What comes of a case: "works", "refused", "wrong", or "untried", and why.

    `because` is the declared case that decides it.
    """

    kind: str
    reason: str = ""
    because: Case = ()


def of_each(wrappers: tuple[str, ...], reason: str, *features: str) -> dict[Case, str]:
    """One reason for several wrappers with each feature, or pair "one other"."""
    return {(w, *names.split()): reason for names in features for w in wrappers}


NAIVE, REPLICATED = ("naive",), ("naive", "ddp")
OF_PARAMETERS = "reduces the gradients of these parameters already"
NO_VALUES = "is on the meta device, so there are no values to copy to the other ranks"
REFUSED: dict[Case, str] = {
    **of_each((*REPLICATED, *ZERO, *FSDP),
              "need a GradScaler that asks all tensor ranks",
              "tensor grad_scaler", "sequence_parallel grad_scaler"),
    **of_each(NAIVE, "NaiveDataParallel has no no_sync()", "pipeline", *SCHEDULED),
    **of_each(FSDP, "its wrapper holds a shard of that", "pipeline tied"),
    **of_each(("ddp", *ZERO, *FSDP), "need a GradScaler that asks all ranks",
              "pipeline grad_scaler"),
    **of_each((*REPLICATED, *FSDP), "reduces the gradients of this module already",
              "around_naive", "around_ddp", "around_fsdp", "around_torch"),
    **of_each((*REPLICATED, *FSDP), OF_PARAMETERS, "around_zero1"),
    **of_each(ZERO, OF_PARAMETERS, "around_ddp", "around_zero1", "around_fsdp"),
    ("zero2", "around_torch"): "parameters have a whole gradient again",
    **of_each((*REPLICATED, *ZERO), NO_VALUES, "meta"),
    **of_each(NAIVE, "'NaiveDataParallel' object has no attribute 'no_sync'",
              "no_sync", "reduce_gradients"),
    **of_each(NAIVE, "got an unexpected keyword argument 'collectives'", "ring"),
    **of_each((*REPLICATED, *FSDP), "got an unexpected keyword argument 'offload'",
              "offload"),
    **of_each((*NAIVE, *ZERO, *FSDP), "object has no attribute 'join'", "join"),
    ("ddp", "interleaved", "join"): "a second forward before the backward of the first",
}  # fmt: skip
"""What raises on every rank, and words of its error."""

WRONG: dict[Case, str] = {}
"""What runs and gives other weights than one process, and what to do instead."""

BESIDE_STAGES = {
    "bf16", "autocast", "grad_scaler", "recompute", "own_recompute", "clip", "ring",
    "adamw", "tied", "frozen",
}  # fmt: skip
"""What a pipeline is tried with: what does not ask for another loop."""


def verdict(case: Case) -> Verdict:
    """What is declared of a case; "works" unless something in it is."""
    for kind, entries in (("refused", REFUSED), ("wrong", WRONG)):
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
    names = case[1:]
    return (len(names) == 1 or is_pair(*names)) and verdict(case).because in ((), case)


def is_pair(one: str, other: str) -> bool:
    """No two alternatives; a wrapper around a wrapper is tried alone.

    Of pipelines 1F1B alone is tried with others: the runner is the same.
    """
    axes = {FEATURES[one].axis, FEATURES[other].axis}
    if {one, other} & {"pipeline", *SCHEDULED}:  # whose runner has a loop of its own
        return "pipeline" in (one, other) and bool({one, other} & BESIDE_STAGES)
    return len(axes) == 2 and INNER not in axes
