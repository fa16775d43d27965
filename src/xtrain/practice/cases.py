"""One drill's file on virtual ranks: what each case gave and sent.

    file    executed anew on every rank, so that a global belongs to one rank
    check   the self-check of the whiteboard form; here it notes instead of stopping
    case    1, 2, 3, 4 ranks, and ranks 1 and 3 of 4 as a group; collectives also on 6

A message takes one second of virtual time, whatever its size, so clocks count rounds.
Memory that `torch.empty` gives is filled with NaN. Runs in a process of its own:

    name and source in, outcomes out: a line of JSON each
"""

import importlib
import inspect
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.copying.forms import check_file, forms, public_name
from xtrain.copying.self_checks import harness
from xtrain.practice.outcomes import (
    FILE,
    Counted,
    Noted,
    Outcome,
    encoded,
    line_here,
)
from xtrain.practice.running import (
    Held,
    advance,
    alone,
    kept,
    now,
    on_ranks,
    prepared,
)
from xtrain.practice.schedule_cases import beside, simulated
from xtrain.testing.errors import RankError, RankTimeout

SIZES = (1, 2, 3, 4)
REFERENCES = {"attention", "of_every_expert"}
"""Functions of the checks that compute for long."""
PAIR = (1, 3)
PLACE = re.compile(re.escape(FILE) + r'(?:", line |:)(\d+)')


class Book:
    """What the ranks of one case note, each for itself."""

    def __init__(self, size: int):
        self.noted: list[list[Noted]] = [[] for _ in range(size)]
        self.counted: list[list[Counted]] = [[] for _ in range(size)]
        self.drawn: list[dict[int, Tensor]] = [{} for _ in range(size)]
        self.calls: dict[str, int] = {}
        self.compared = [0] * size
        """How far this attempt is: a rank may be run again from its start."""

    def begin(self, rank: int) -> None:
        """A rank is run from its start."""
        self.compared[rank] = 0
        self.counted[rank].clear()

    def draws(self, *shape: int, seed: int) -> Tensor:
        """`harness.randn`, remembered: the check knows what every rank brings."""
        drawn = harness_randn(*shape, seed=seed)
        self.drawn[dist.get_rank()][seed] = drawn.clone()
        return drawn

    def same(
        self, what: str, actual: Any, expected: Any, tolerance: float = 1e-12
    ) -> None:
        """`harness.same`, which goes on after a difference."""
        rank = dist.get_rank()
        if self.compared[rank] == len(self.noted[rank]):
            self.noted[rank].append(
                compared(what, actual, expected, tolerance, self.drawn[rank])
            )
        self.compared[rank] += 1
        dist.barrier(harness.GROUP.get())

    def sends(self, sent: "Watched", formula: str, nbytes: float) -> None:
        """`harness.sends`, which notes."""
        numbers = sent.messages, sent.nbytes, float(nbytes), sent.rounds
        one = Counted(formula, *numbers, sent.held.most if sent.held else 0.0)
        self.counted[dist.get_rank()].append(one)


class Watched(harness.Sent):
    """Also counts rounds and memory, and remembers which line makes which call."""

    rounds = 0.0
    book: Book

    def __enter__(self) -> Any:
        dist.barrier(harness.GROUP.get())
        self.begun, self.held = now(), Held and Held()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.rounds = now() - self.begun
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.name().startswith("c10d::"):
            name = func.name().removeprefix("c10d::")
            self.book.calls.setdefault(name, line_here())
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        if self.held:
            self.held.note((args, kwargs), returned)
        return returned


harness_randn = harness.randn


def compared(
    what: str, actual: Any, expected: Any, tolerance: float, drawn: dict[int, Tensor]
) -> Noted:
    """Is it the same, and if not: the first element that differs, and whose it is."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        if actual == expected:
            return Noted(what, True)
        problem = f"{what} is {shown(actual)} instead of {shown(expected)}"
        return Noted(what, False, problem, tuple(map(float, str(actual).encode())))
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        kinds = [
            f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for t in (actual, expected)
        ]
        return Noted(what, False, f"{what}: {kinds[0]} instead of {kinds[1]}")
    if torch.equal(actual, expected):
        return Noted(what, True)
    with torch.no_grad():
        largest = expected.abs().max().item() if expected.numel() else 0.0
        wider = harness.WIDER.get(actual.dtype, 1)
        allowed = tolerance * wider * max(1.0, largest)
        off = ~((actual - expected).abs() <= allowed)
        if not off.any():
            return Noted(what, True)
        place = off.nonzero()[0].tolist()
        first = int(off.flatten().nonzero()[0])
        values = actual.double().flatten().nan_to_num()
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64)
        sums = values.sum().item(), (values * weights).sum().item()
        got, wanted = actual.flatten()[first].item(), expected.flatten()[first].item()
    at = ", ".join(map(str, place or [0]))
    close = f"{got:.6g}" == f"{wanted:.6g}"
    problem = f"{what}: [{at}] is {got:{'.15g' if close else '.6g'}} instead of "
    problem += f"{wanted:{'.15g' if close else '.6g'}}"
    count = int(off.sum())
    problem += f" ({count} of {off.numel()} differ)" if off.numel() > 1 else ""
    problem += contributions(got, first, actual.shape, drawn)
    return Noted(what, False, problem, (*sums, float(count)))


def contributions(
    got: float, place: int, shape: torch.Size, drawn: dict[int, Tensor]
) -> str:
    """Whose numbers a wrong element is made of, if the ranks' inputs can tell."""
    if got != got:
        return "; it is NaN: never written, or computed from such a number, or 0/0"
    inputs = {s: t for s, t in drawn.items() if t.shape == shape and s < 8}
    if not 2 <= len(inputs) <= 4 or list(inputs) != list(range(len(inputs))):
        return ""
    values = [t.flatten()[place].item() for t in inputs.values()]
    for number in range(4 ** len(values)):
        counts = [number // 4**i % 4 for i in range(len(values))]
        if abs(sum(c * v for c, v in zip(counts, values, strict=True)) - got) < 1e-9:
            return "; " + in_words(counts)
    for rank, tensor in inputs.items():
        found = (tensor.flatten() - got).abs() < 1e-12
        if found.any():
            return f"; that is rank {rank}'s number {int(found.nonzero()[0])}"
    return ""


def in_words(counts: list[int]) -> str:
    """ "it lacks rank 2 and counts rank 1 2 times"."""
    if sum(counts) == 1:
        return f"it is the number of rank {counts.index(1)} alone"
    missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
    more = [f"rank {r} {c} times" for r, c in enumerate(counts) if c > 1]
    parts = [f"lacks rank {', '.join(missing)}"] * bool(missing)
    parts += [f"counts {', '.join(more)}"] * bool(more)
    return "it " + " and ".join(parts)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Drilled:
    """A file to check as the whiteboard form `name` is checked.

    Raises whatever executing the file raises; NameError if it lacks the name.
    """

    def __init__(self, name: str, source: str):
        self.name, self.folder = name, forms()[name].parent.name
        text = forms()[name].read_text(encoding="utf-8")
        self.called = public_name(text)
        self.source, self.code = source, prepared(source)
        self.checks = importlib.import_module(
            f"xtrain.copying.self_checks.{check_file(name).stem}"
        )
        self.check: Callable[..., None] = getattr(self.checks, f"check_{name}")
        with alone():
            mine, wanted = (
                inspect.signature(loaded(code, self.called))
                for code in (self.code, compile(text, FILE, "exec"))
            )
        self.grouped = "group" in wanted.parameters
        check_signature(self.called, mine, wanted)

    def load(self) -> Any:
        """The function or class, of a module executed afresh."""
        return loaded(self.code, self.called)

    def outcomes(self) -> Iterator[Outcome]:
        """Of every case, up to an endless loop."""
        if self.folder == "schedules":
            yield self.plain()
            return
        sizes = getattr(self.checks, "SIZES", {}).get(self.name, SIZES)
        more = (6,) if self.folder == "comm" and sizes is SIZES else ()
        for size in [*(size for size in sizes if size <= 4), *more]:
            found = self.on_ranks(size, None)
            yield found
            if found.error == "RankTimeout":
                return
        if self.grouped:
            yield self.on_ranks(4, PAIR)

    def plain(self) -> Outcome:
        """A check without ranks."""
        outcome = Outcome("")
        notes: list[Noted] = []
        vars(self.checks)["show"] = lambda orders: None
        vars(self.checks)["same"] = lambda what, actual, expected: notes.append(
            compared(what, actual, expected, 0, {})
        )
        try:
            with alone():
                self.check(self.load())
                notes += self.other_sizes()
        except (Exception, SystemExit) as error:
            told(outcome, error)
        outcome.noted = [notes]
        return outcome

    def other_sizes(self) -> Iterator[Noted]:
        """Of schedules: beside the whiteboard form's."""
        solved = {
            name: getattr(
                importlib.import_module(f"xtrain.whiteboard.schedules.{name}"), name
            )
            for name, path in forms().items()
            if path.parent.name == "schedules"
        }
        best = solved.pop(self.name)
        if self.name == "simulate":
            return simulated(self.load(), best, solved)
        return beside(self.load(), best, self.name, solved["simulate"])

    def on_ranks(self, size: int, pair: tuple[int, ...] | None) -> Outcome:
        """On virtual ranks; `pair` are those of a group in which it runs."""
        words = "1 rank" if size == 1 else f"{size} ranks"
        if pair is not None:
            words = f"the group of ranks {pair[0]} and {pair[1]}"
        outcome, book = Outcome(words), Book(size)
        Watched.book = book
        for module in {harness, self.checks, *self.shared()}:
            for name, instead in (("same", book.same), ("sends", book.sends),
                                  ("Sent", Watched), ("randn", book.draws),
                                  ("computes", lambda: advance(1.0)),
                                  ("say", lambda line: None)):  # fmt: skip
                if hasattr(module, name):
                    setattr(module, name, instead)
        for name in REFERENCES & vars(self.checks).keys():
            setattr(self.checks, name, kept(getattr(self.checks, name)))
        try:
            on_ranks(size, self.on_rank, book, pair)
        except (Exception, SystemExit) as error:
            told(outcome, error)
        outcome.noted = [notes for notes in book.noted if notes or pair is None]
        outcome.counted = [counts for counts in book.counted if counts or pair is None]
        outcome.calls = book.calls
        return outcome

    def shared(self) -> list[ModuleType]:
        """Other modules of checks that this one uses."""
        names = {
            getattr(value, "__module__", "") for value in vars(self.checks).values()
        }
        prefix = harness.__name__.rpartition(".")[0]
        return [sys.modules[n] for n in names if str(n).startswith(prefix)]

    def on_rank(self, book: Book, pair: tuple[int, ...] | None) -> None:
        form = kept(self.load(), self.source)
        book.begin(dist.get_rank())
        group = dist.new_group(list(pair)) if pair else None
        if pair is None or dist.get_rank() in pair:
            harness.in_group(self.check, form, group)


def loaded(code: Any, name: str) -> Any:
    """What a file calls so; NameError if it has nothing of that name."""
    module = ModuleType("drill")
    sys.modules["drill"] = module  # dataclasses look there
    exec(code, module.__dict__)
    if name not in module.__dict__:
        raise NameError(f"the file has no {name}")
    return module.__dict__[name]


def check_signature(
    name: str, mine: inspect.Signature, wanted: inspect.Signature
) -> None:
    """TypeError if it cannot be called as the whiteboard form is."""
    given = list(wanted.parameters.values())
    needed = [p for p in given if p.default is p.empty and p.name != "group"]
    places = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name for p in needed if p.kind is p.KEYWORD_ONLY}
    named |= {"group"} & wanted.parameters.keys()
    try:
        mine.bind(*places, **dict.fromkeys(named))
    except TypeError as error:
        shown = f"{name}({', '.join(mine.parameters)})"
        right = f"{name}({', '.join(wanted.parameters)})"
        words = f"it will be called as {right}; yours is {shown}: {error}"
        raise TypeError(words) from None


def told(outcome: Outcome, error: BaseException) -> None:
    """Put an error into an outcome: its kind, its words, lines of the reader's file."""
    reports = error.reports if isinstance(error, RankError) else []
    cause = error.first.exception if isinstance(error, RankError) else error
    outcome.error = type(cause or error).__name__
    outcome.words = str(cause or error).strip()
    if isinstance(error, RankTimeout):
        outcome.error = "RankTimeout"
        outcome.words = error.headline
        text = error.first.detail
    else:
        ranks = [r.rank for r in reports if type(r.exception) is type(cause)]
        text = "".join(traceback.format_exception(cause or error))
        if ranks and outcome.error not in ("Deadlock",):
            outcome.words = f"rank {ranks[0]}: {outcome.words}"
    outcome.lines = [int(line) for line in PLACE.findall(text)]
    if outcome.error == "AssertionError" and not outcome.lines:
        asked = traceback.extract_tb((cause or error).__traceback__)[-1].line
        outcome.words += f" in the check's `{asked}`"


def outcomes_of(name: str, source: str) -> Iterator[Outcome]:
    """Of a file, case by case; one that cannot be executed has one outcome."""
    try:
        drilled = Drilled(name, source)
    except (Exception, SystemExit) as error:
        outcome = Outcome("importing the file")
        told(outcome, error)
        if isinstance(error, SyntaxError):
            outcome.lines = [error.lineno or 0]
        yield outcome
        return
    yield from drilled.outcomes()


def main() -> None:
    """A name and a source as a line of JSON in, outcomes as a line of JSON out."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    torch.set_num_threads(1)
    with tempfile.TemporaryFile() as printed:  # limited, as all files of this process
        os.dup2(printed.fileno(), 1)
        for line in questions:
            torch.set_default_dtype(torch.float64)
            # Fills `torch.empty` with NaN.
            torch.use_deterministic_algorithms(True, warn_only=True)
            print(encoded([*outcomes_of(*json.loads(line))]), file=answers)
            answers.flush()
