"""Tables of the support matrix, read from the record of tests/matrix/test_matrix.py.

A test's name gives the cases that it runs, and when it passes all of them come out as
 `xtrain_docs.matrix.cases` declares. What no recorded test has run on the
current code is "untried".
"""

from collections.abc import Iterable

from xtrain_docs.matrix.cases import (
    REFUSED,
    WRONG,
    Case,
    Verdict,
    cases,
    is_pair,
    verdict,
)
from xtrain_docs.matrix.features import FEATURES, INNER, WRAPPERS

from .. import verification
from . import REGISTRY, Table

SYMBOL = "xtrain_docs.matrix.training:train"
ROW = "tests/matrix/test_matrix.py::test_a_feature_with_every_other"
OURS = "tests/matrix/test_matrix.py::test_every_feature_on_a_backend_of_ours"
BACKENDS = ("gloo", "xtrain-shm", "xtrain-socket", "nccl")
SHORT = {
    "naive": "naive",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP",
    "fsdp_kept": "FSDP kept",
}
PLAIN = [name for name, feature in FEATURES.items() if feature.axis != INNER]
NONE = "no wrapper takes both"


def backends_of(test: str) -> set[str]:
    """On which backends a test has passed, with the current code."""
    return {
        backend
        for passed in verification.ledger().summary(SYMBOL).good
        if passed.id == test
        for backend, _ in passed.places
    }


def found(case: Case) -> Verdict:
    """What the tests have found of a case."""
    wrapper, *names = case
    first = min(names, key=list(FEATURES).index)  # a test runs it with all later ones
    if backends_of(f"{ROW}[{wrapper}-{first}]"):
        return verdict(case)
    return Verdict("untried")


@REGISTRY
def support_backends() -> Table:
    """How many cases have come out as declared, by wrapper and backend."""
    rows = []
    for wrapper, title in WRAPPERS.items():
        numbers = dict.fromkeys(BACKENDS, 0)
        for name in FEATURES:
            for backend in backends_of(f"{ROW}[{wrapper}-{name}]"):
                numbers[backend] += len(cases(wrapper, name))
        for backend in ("xtrain-shm", "xtrain-socket"):
            if not numbers[backend] and backends_of(f"{OURS}[{backend}-{wrapper}]"):
                numbers[backend] = len(FEATURES)
        rows.append([title, *(str(n or "untried") for n in numbers.values())])
    return Table(["", *(f"`{name}`" for name in BACKENDS)], rows, "lrrrr")


@REGISTRY
def support_features() -> Table:
    """Each feature with each wrapper."""
    return by_wrapper(PLAIN)


@REGISTRY
def support_nesting() -> Table:
    """Each wrapper around a module that has one already."""
    return by_wrapper([name for name in FEATURES if name not in PLAIN])


def by_wrapper(names: Iterable[str]) -> Table:
    rows = [
        [FEATURES[name].title, *(found((wrapper, name)).kind for wrapper in WRAPPERS)]
        for name in names
    ]
    return Table(["", *SHORT.values()], rows, "l" + "c" * len(SHORT))


@REGISTRY
def support_reasons() -> Table:
    """Every case that does not work, and why."""
    same: dict[tuple[str, str, str], list[str]] = {}
    for case, reason in (*REFUSED.items(), *WRONG.items()):
        wrapper, *names = case
        what = ", ".join(FEATURES[name].title for name in names)
        kind = found(case).kind
        said = f"`{reason}`" if case in REFUSED else reason
        same.setdefault((what, kind, said), []).append(SHORT[wrapper])
    rows = [
        [what, ", ".join(wrappers), kind, said]
        for (what, kind, said), wrappers in sorted(same.items(), key=by_feature)
    ]
    return Table(["feature", "wrapper", "", "because"], rows, "llcl")


def by_feature(entry: tuple[tuple[str, str, str], list[str]]) -> int:
    """The place of a row's first feature among all."""
    titles = [feature.title for feature in FEATURES.values()]
    return next(n for n, title in enumerate(titles) if entry[0][0].startswith(title))


@REGISTRY
def support_pairs() -> Table:
    """With how many of the others it is tried with each works, and with which not."""
    rows = []
    for name in PLAIN:
        others = [other for other in PLAIN if is_pair(name, other)]
        if not others:
            continue
        outcomes = {other: outcome(name, other) for other in others}
        works = list(outcomes.values()).count("works")
        told = "<br>".join([f"{works} of {len(others)}", *exceptions(outcomes)])
        rows.append([FEATURES[name].title, told])
    return Table(["", "works with"], rows, "ll")


def outcome(name: str, other: str) -> str:
    """What comes of two features with the wrappers that take both of them alone."""
    taken = [
        wrapper
        for wrapper in WRAPPERS
        if verdict((wrapper, name)).kind == verdict((wrapper, other)).kind == "works"
    ]
    kinds = {wrapper: found((wrapper, name, other)).kind for wrapper in taken}
    worst = next(
        (k for k in ("wrong", "untried", "refused") if k in kinds.values()), ""
    )
    if not worst:
        return "works" if taken else NONE
    if all(kind == worst for kind in kinds.values()):
        return worst
    among = [SHORT[wrapper] for wrapper in taken if kinds[wrapper] == worst]
    return f"{worst} under {', '.join(among)}"


def exceptions(outcomes: dict[str, str]) -> list[str]:
    """How it ends with features with which it does not work, and these features."""
    if set(outcomes.values()) - {NONE} == {"untried"}:
        return ["untried"]
    same: dict[str, list[str]] = {}
    for other, what in outcomes.items():
        if what != "works":
            same.setdefault(what, []).append(FEATURES[other].title)
    return [f"{what}: {'; '.join(names)}" for what, names in same.items()]
