"""The hang lab: twelve recorded jobs, and who is to blame in each.

    faults()                      every job with its fault, in the order of the lab
    output(fault), calls(fault)   what its user sees: output, and the dumps in short
    judge(fault, rank, call)      whether that is the fault, and why
    report(fault)                 what `xtrain hang` tells of the same dumps

The words are in faults.toml, the recorded runs in runs.json, the jobs in jobs.py.
"""

import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xtrain.comm.flight_recorder_files import RankDump, read_dumps
from xtrain.comm.flight_recorder_report import diagnose
from xtrain.practice.hang_lab import jobs

HERE = Path(__file__).parent
FAULTS, RUNS = HERE / "faults.toml", HERE / "runs.json"
SIZE = 3  # ranks of every job
RANKS = (*map(str, range(SIZE)), "all")
NO_CALL = "none"
CALLS = ("all_reduce", "all_to_all_single", "barrier", "new_group", "recv", "send",
         NO_CALL)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A job and what is wrong with it.

    Attributes:
        job: the name of its function in `jobs`.
        title: what it does; does not tell the fault.
        rank: that is to blame, one of `RANKS`.
        call: of `CALLS`, which it lacks, makes wrongly or too often; several are
            parted by spaces.
        told: words of `xtrain hang` that name it; empty where it cannot see it.
        why, cure: Markdown, with links from docs/en/labs.
        live: its dumps are those of the moment at which ranks wait.
    """

    job: str
    title: str
    rank: str
    call: str
    told: str
    why: str
    cure: str
    live: bool = False

    @property
    def source(self) -> str:
        """The program."""
        return inspect.getsource(getattr(jobs, self.job)).rstrip()


@dataclass(frozen=True)
class Judgement:
    """`right`, and why, in words."""

    right: bool
    words: str


@cache
def faults() -> tuple[Fault, ...]:
    """All of the lab."""
    entries = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    return tuple(Fault(**entry) for entry in entries)


def fault(name: str) -> Fault:
    """One by its number from 1, or by its job's name.

    Raises:
        ValueError: there is none.
    """
    for number, one in enumerate(faults(), 1):
        if name in (str(number), one.job):
            return one
    raise ValueError(f"no fault {name!r}: there are 1 to {len(faults())}")


@cache
def _runs() -> dict[str, Any]:
    return json.loads(RUNS.read_text(encoding="utf-8"))


def write_dumps(one: Fault, folder: Path) -> list[Path]:
    """Write the recorded files, for `xtrain hang`, and return their places."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for rank, dump in enumerate(_runs()[one.job]["dumps"]):
        if dump is not None:
            files.append(folder / f"rank-{rank}.json")
            files[-1].write_text(json.dumps(dump))
    return files


@cache
def dumps(one: Fault) -> dict[int, RankDump]:
    """The recorded files as they are read, by rank."""
    with TemporaryDirectory() as folder:
        return {dump.rank: dump for dump in read_dumps(write_dumps(one, Path(folder)))}


def report(one: Fault) -> str:
    """What `xtrain hang` prints."""
    return str(diagnose(list(dumps(one).values())))


# -- what is shown


def output(one: Fault) -> str:
    """What the ranks have printed, one after another, and how each ended."""
    return "\n".join(
        f"[rank{rank}] {line}"
        for rank, lines in enumerate(_runs()[one.job]["output"])
        for line in lines
    )


def calls(one: Fault) -> str:
    """The dumps in short: the reason, then a line a call."""
    return "\n".join(
        line for rank in range(SIZE) for line in _lines(rank, dumps(one).get(rank))
    )


def _lines(rank: int, dump: RankDump | None) -> Iterator[str]:
    if dump is None:
        yield f"rank {rank}: no file"
        return
    yield f"rank {rank}: {dump.reason}"
    for call in dump.calls:
        yield f"  {call.group[0]}/{call.number} {call}: {call.state}"
    if not dump.calls or dump.line != dump.calls[-1].line:
        yield f"  at {dump.line}"


# -- what is judged


def judge(one: Fault, rank: str, call: str) -> Judgement:
    """Whether `rank` and `call` are the fault, and why.

    Raises:
        ValueError: a rank that is not in `RANKS`, a call that is not in `CALLS`.
    """
    if rank not in RANKS or call not in CALLS:
        raise ValueError(f"rank {rank} is to be one of {', '.join(RANKS)} and call "
                         f"{call} one of {', '.join(CALLS)}")  # fmt: skip
    if rank != one.rank:
        return Judgement(False, f"No. {about(one, rank)}")
    if call not in one.call.split():
        clue = f"Ask which call of rank {rank} has no partner, or is no partner."
        if one.call == NO_CALL:
            clue = "It will still come to its call: see its line."
        return Judgement(False, f"The rank is right, the call is not. {clue}")
    return Judgement(True, f"Right. {one.why}\n\n{one.cure}")


def about(one: Fault, rank: str) -> str:
    """Why it is not this rank, or not all of them."""
    if one.rank == "all":
        return f"Rank {rank} does what every other rank does."
    if rank == "all":
        return "One rank differs from the others. Compare their calls."
    dump = dumps(one).get(int(rank))
    if dump is None:
        return f"Rank {rank} left no file, but its output tells why it ended."
    waits = [call for call in dump.calls if call.state != "completed"]
    if not waits:
        return f"Rank {rank} waits in no recorded call. Look at where it was."
    place = f"{waits[-1].op} at {waits[-1].line.partition(' ')[0]}"
    return f"Rank {rank} waits in {place}. Ask whom it waits for."
