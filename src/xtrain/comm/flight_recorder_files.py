"""Reads the files of flight recorders: ours (JSON) and torch's (pickle or JSON).

    file -> RankDump: rank, where it was, groups, calls in the order of the program

Fields of an entry of torch 2.13, version "2.10" of its format, which NCCL and gloo
write: process_group (name, description), collective_seq_id, p2p_seq_id, profiling_name
("nccl:all_reduce", "nccl:send 0->1", "nccl:recv 1<-0"), input_sizes, output_sizes,
input_dtypes, output_dtypes, state (scheduled, started, completed), retired, is_p2p,
time_created_ns, frames (filename, line, name). Beside `entries` it has
`pg_config`: name, desc and ranks ("[0, 1]") by group. The rank is the number at the end
of the file's name. Source: torch/distributed/flight_recorder/components/types.py.

The pickle may hold plain values only: no class is looked up, so nothing can run.
"""

import io
import json
import math
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xtrain.comm.flight_recorder_calls import is_program
from xtrain.testing.call_stack import short

TORCH = "/site-packages/torch/"  # on any machine
DEFAULT = "default_pg"  # the description that torch gives the default group
ANY = -1  # as the peer of a message
Channel = tuple[Any, ...]
"""A group; for messages also their ends and their tag. It counts its calls."""


class Group(NamedTuple):
    """Of one name on all its ranks; `ranks` are global, empty if not known."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        members = f" ({in_words(self.ranks)})" if self.ranks else ""
        if self.description == DEFAULT:
            return f"default group{members}"
        known = self.description not in ("", "undefined")
        name = f"{self.name} {self.description}" if known else self.name
        return f"group {name!r}{members}"


@dataclass(frozen=True)
class DumpedCall:
    """A call as its rank wrote it.

    Attributes:
        number: in its channel, from 1; 0 for a message whose count is not known.
        peer: global rank of the other end of a message, or `ANY`.
        sizes: of its inputs and outputs: elements of each tensor.
        tensors: shape and dtype in words.
        created: ns since the epoch.
        state: "started", "completed" or "failed".
    """

    rank: int
    op: str
    group: Group
    number: int
    peer: int
    tag: Any
    root: Any
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tensors: str
    line: str
    created: int
    state: str

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def channel(self) -> Channel:
        if not self.is_message:
            return (self.group,)
        ends = (self.rank, self.peer) if self.op == "send" else (self.peer, self.rank)
        return self.group, ends, self.tag

    def __str__(self) -> str:
        peer = ""
        if self.is_message:
            other = "any rank" if self.peer == ANY else f"rank {self.peer}"
            peer = f" {'to' if self.op == 'send' else 'from'} {other}"
        return f"{self.op}({self.tensors}){peer} at {self.line}"


@dataclass(frozen=True)
class RankDump:
    """A file: what a rank has called, where it was, and why and when it wrote.

    Of torch's file neither `reason` nor `line` is known, and `time` is infinite.
    """

    rank: int
    file: Path
    ranks: int
    reason: str
    line: str
    time: float
    calls: list[DumpedCall]


def in_words(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2 and 3", "ranks 0 to 7"."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers[:16]]
    if numbers[16:]:
        shown.append(f"{len(numbers) - 16} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def read_dumps(paths: Iterable[Path]) -> list[RankDump]:
    """The files, and those of folders, by rank.

    Raises:
        ValueError: naming the file: it is damaged, no file of a flight recorder, or the
            second one of a rank.
        OSError: it cannot be read.
    """
    dumps: dict[int, RankDump] = {}
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found = [file for file in inside if re.search(r"\d(\.json)?$", file.name)]
        for file in found if path.is_dir() else [path]:
            dump = read_dump(file)
            first = dumps.setdefault(dump.rank, dump)
            if first is not dump:
                raise ValueError(
                    f"two files are of rank {dump.rank}: {first.file} and {file}"
                )
    if not dumps:
        raise ValueError("there is no file of a flight recorder")
    return [dumps[rank] for rank in sorted(dumps)]


def read_dump(path: Path) -> RankDump:
    """One file."""
    content = path.read_bytes()
    try:
        if content.lstrip()[:1] == b"{":
            data = json.loads(content)
        else:
            data = _PlainUnpickler(io.BytesIO(content)).load()
        return _dump_of(data, path)
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, MemoryError,
        RecursionError, TypeError, ValueError, pickle.UnpicklingError,
    ) as problem:  # fmt: skip
        text = f"{path} is damaged or no file of a flight recorder"
        raise ValueError(f"{text}: {problem!r}") from problem


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}, a plain file holds no objects")


def _dump_of(data: Mapping[str, Any], path: Path) -> RankDump:
    named = re.search(r"(\d+)(\.\w+)?$", path.name)  # torch's nccl_trace_rank_3
    if "rank" not in data and not named:
        raise ValueError("its name has to end with the number of its rank")
    rank = int(data["rank"] if "rank" in data else named[1])  # type: ignore[index]
    groups = {
        name: tuple(int(r) for r in json.loads(config["ranks"] or "[]"))
        for name, config in data["pg_config"].items()
    }
    calls = [
        _call_of(entry, rank, groups)
        for entry in data["entries"]
        # a batch of messages is an entry of its own beside them
        if not (entry["is_p2p"] and entry["profiling_name"].endswith("coalesced"))
    ]
    known = [r for ranks in groups.values() for r in ranks]
    ranks = int(data.get("world_size", 1 + max([rank, *known])))
    return RankDump(
        rank, path, ranks, str(data.get("reason", "")),
        _line(data["frames"]) if "frames" in data else "",
        float(data.get("time_ns", math.inf)), calls,
    )  # fmt: skip


def _call_of(
    entry: Mapping[str, Any], rank: int, groups: Mapping[str, tuple]
) -> DumpedCall:
    name, description = map(str, entry["process_group"])
    # torch's gloo writes the default group without its name
    ranks = groups.get(name) or groups.get("" if description == DEFAULT else name, ())
    op, _, ends = entry["profiling_name"].rpartition(":")[2].partition(" ")
    peer, number = ANY, int(entry["collective_seq_id"])
    if op in ("send", "recv"):
        _, end = re.split("->|<-", ends)
        if end != "?":
            peer = ranks[int(end)] if ranks else int(end)
        # torch does not count them by peer
        number = int(entry["p2p_seq_id"]) if "tag" in entry else 0
    state = entry["state"]
    if state not in ("completed", "failed"):
        state = "completed" if entry.get("retired") else "started"
    sides = [
        list(zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True))
        for side in ("input", "output")
    ]
    return DumpedCall(
        rank, op, Group(name, description, ranks), number, peer,
        entry.get("tag"), entry.get("root"),
        tuple(tuple(math.prod(shape) for shape, _ in side) for side in sides),
        tuple(sorted({dtype for side in sides for _, dtype in side})),
        " -> ".join(dict.fromkeys(map(_tensors, sides))),
        _line(entry.get("frames", [])), int(entry["time_created_ns"]), state,
    )  # fmt: skip


def _tensors(side: Sequence[tuple[Any, str]]) -> str:
    words = [f"{dtype.lower()}{list(shape)}" for shape, dtype in side]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if words[3:] else "")


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    if not frames:
        return "a line that was not recorded"
    own = (
        f for f in frames if is_program(f["filename"]) and TORCH not in f["filename"]
    )
    frame = next(own, frames[0])
    return f"{short(frame['filename'])}:{frame['line']} in {frame['name']}"
