"""record: a job of the lab on real processes, with its output and its dumps.

    this process --fork--> rank 0, 1, 2    each writes output to a file of its own
                 <-files-- rank-0.json, ...     what the flight recorders left

Ranks are processes on gloo, where a call may take `jobs.SECONDS`. A rank that is
stopped is killed when the others have ended. Places of this machine are taken out of
what is kept. Cost: the seconds of a call, in which the ranks wait.

    python -m xtrain.practice.hang_lab.recording     records all of them anew
"""

import faulthandler
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm.flight_recorder import WISH, FlightRecorder
from xtrain.comm.transport_errors import in_short
from xtrain.practice.hang_lab import jobs
from xtrain.practice.hang_lab.lab import RUNS, SIZE, faults

STUCK = 1.0  # seconds after which a recorder writes
LIMIT = 20.0  # seconds for a job
MACHINE = (  # what only this machine has, and what stays of it
    (r'[^\s"\[(]*/(?=(?:jobs|recording)\.py)', ""),
    (r'[^\s"\[(]*third_party/gloo/(?=gloo/)', ""),
    (r" ?\[127\.0\.0\.1\]:\d+", ""),
    (r"\[rank\d\]:\[E\d+ [\d:.]+ ", "["),
)


def record(name: str, folder: Path, live: bool = False) -> dict[str, Any]:
    """Run the job `name` and return what it leaves.

    Args:
        folder: empty; of outputs and dumps.
        live: keep what is there while the ranks wait, not what is there at the end.

    Returns:
        `output`: of each rank its lines and, last, how it ended; `dumps`: the content
        of the files of its flight recorders, None where there is none.
    """
    context: Any = multiprocessing.get_context(
        "fork" if sys.platform == "linux" else "spawn"
    )
    ranks = [
        context.Process(target=_rank, args=(name, rank, folder)) for rank in range(SIZE)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        for rank in ranks:
            rank.start()
    limit, kept = time.monotonic() + LIMIT, None
    while time.monotonic() < limit:
        running = [rank for rank in ranks if rank.is_alive()]
        if all(_is_stopped(rank) for rank in running):
            break
        if live and not kept and (folder / "dumps" / WISH).exists():
            time.sleep(0.7)  # all have written
            kept = _found(folder, ["still running"] * SIZE)
        time.sleep(0.02)
    endings = [_ending(rank) for rank in ranks]
    return kept or _found(folder, endings)


def _is_stopped(rank: Any) -> bool:
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, rank.pid, options) is not None
    except ChildProcessError:  # it has just ended
        return False


def _ending(rank: Any) -> str:
    """How a rank has ended, in words; it is killed if it has not."""
    if rank.is_alive():
        rank.kill()
        rank.join()
        return "no end: the process is still there"
    if rank.exitcode < 0:
        return f"ended by signal {-rank.exitcode}"
    return f"exit code {rank.exitcode}"


def _found(folder: Path, endings: list[str]) -> dict[str, Any]:
    """What lies in the folder."""
    output, dumps = [], []
    for rank, ending in enumerate(endings):
        text = (folder / f"output-{rank}").read_text()
        output.append([*without_machine(text).splitlines(), f"({ending})"])
        file = folder / "dumps" / f"rank-{rank}.json"
        dumps.append(json.loads(file.read_text()) if file.exists() else None)
    start = min((e["time_created_ns"] for d in dumps if d for e in d["entries"]),
                default=0)  # fmt: skip
    return {"output": output, "dumps": [_relative(dump, start) for dump in dumps]}


def without_machine(text: str) -> str:
    """The text less the places of files and the addresses of this machine."""
    for pattern, kept in MACHINE:
        text = re.sub(pattern, kept, text)
    return text


def _relative(dump: dict[str, Any] | None, start: int) -> dict[str, Any] | None:
    """A dump whose times begin with the job, a second after 0, and without places."""
    if dump is None:
        return None
    dump = json.loads(without_machine(json.dumps(dump)))
    dump |= {"host": "host", "pid": 0, "time_ns": _after(dump["time_ns"], start)}
    for entry in dump["entries"]:
        for name in ("time_created_ns", "time_discovered_completed_ns"):
            entry[name] = entry[name] and _after(entry[name], start)
    return dump


def _after(time_ns: int, start: int) -> int:
    """In whole milliseconds."""
    return (time_ns - start + 10**9) // 10**6 * 10**6


def _rank(name: str, rank: int, folder: Path) -> None:
    """One process: its output goes to a file, and an error ends it with code 1."""
    file = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.disable()  # of the process that forks
    torch.set_num_threads(1)
    code = 0
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE,
            timeout=jobs.SECONDS,
        )  # fmt: skip
        with FlightRecorder(folder / "dumps", stuck_after=STUCK):
            getattr(jobs, name)(rank, SIZE)
    except Exception as error:
        print(_told(error), file=sys.stderr)
        code = 1
    os._exit(code)


def _told(error: Exception) -> str:
    """The traceback as Python prints it, less the lines inside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
        f"    {frame.line}\n"
        for frame in frames
        if frame.filename == jobs.__file__
    ]
    last = f"{type(error).__name__}: {in_short(error)}"
    return "".join(["Traceback (most recent call last):\n", *own, last])


def main() -> None:
    """Record all jobs and write the file of the lab."""
    found = {}
    for fault in faults():
        with tempfile.TemporaryDirectory() as folder:
            found[fault.job] = record(fault.job, Path(folder), fault.live)
    lines = [f"{json.dumps(job)}: {json.dumps(run)}" for job, run in found.items()]
    RUNS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
