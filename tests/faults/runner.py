"""Runs the trainer in real processes, makes one fault, and collects how each rank ends.

    pytest, torch imported -- fork --> rank 0 .. n-1: train(recipe)
       |                                  the victim, where it enters a phase: the fault
       +-- fork --> TCP store, as torchrun's agent has one
       +-- joins the survivors until a deadline, then ends every process

Ranks may be on two nodes, which are network namespaces with a cable between them.

The hook stands on `Place.enter`, so the trainer's code has nothing of it. A rank writes
how it ended to a file; one that is killed or stopped writes none.
"""

import ctypes
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.backends.test_two_hosts import ADDRESSES
from tests.faults.cases import CUT, DISK, SLOW_NETWORK
from xtrain.checkpoint import files
from xtrain.pipeline_parallel.computations import Computations
from xtrain.schedules import Action
from xtrain.train import run
from xtrain.train.phases import Place
from xtrain.train.recipe import Recipe
from xtrain.train.stopping import STATUS

DEADLINE = 150.0
"""Seconds until processes are ended that should have ended themselves."""
ROOM = 4096
"""Bytes: below a rank's file of a checkpoint, above what it prints."""
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, its error with notes, when, and its steps."""

    code: int | None
    error: str = ""
    after: float = 0.0
    """Seconds since the fault; up to its last line of output if it left no more."""
    losses: tuple[float, ...] = ()
    step: int = 0
    output: str = ""


def told_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def told_twice() -> None:
    told_to_stop()
    told_to_stop()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ArithmeticError("made by the test")


def disk_full() -> None:
    """The kernel refuses to let a file of this process grow beyond ROOM."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, UNLIMITED))


def cable_down() -> None:
    """Of this node: it tells nobody, so all find out by their timeouts."""
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)


def cable_slow() -> None:
    """A kernel may lack the first way."""
    ways = "netem delay 60ms", "tbf rate 400kbit burst 2kb latency 5s"
    words = ["tc", "qdisc", "add", "dev", "cable", "root"]
    assert any(subprocess.run([*words, *way.split()]).returncode == 0 for way in ways)


FAULTS: dict[str, Callable[[], None]] = {
    "kill -9": killed,
    "SIGSTOP": stopped,
    "SIGTERM": told_to_stop,
    "SIGTERM twice": told_twice,
    "exception": raises,
    DISK: disk_full,
    CUT: cable_down,
    SLOW_NETWORK: cable_slow,
}


def hooked(what: str, phase: str, step: int, note: Path) -> None:
    """The fault comes once, where this process has begun the phase of the step.

    start        the ranks have met, there is no model
    checkpoint   this rank's file is written, the checkpoint is not published; a disk
                 is full before
    forward, backward    of a pipeline: before its first action of that kind
    """
    steps = [0]

    def now(name: str) -> None:
        if (name, steps[0]) == (phase, step) and not note.exists():
            note.write_text(str(time.time()))
            FAULTS[what]()

    def entering(place: Place, name: str, number: int | None = None) -> None:
        enter(place, name, number)
        steps[0] = place.step
        if name != "checkpoint" or what == DISK:
            now(name)

    def making(*args: Any) -> Any:
        now("start")
        return make_mesh(*args)

    def writing(*args: Any) -> Any:
        written = write_file(*args)
        now("checkpoint")
        return written

    def running(self: Computations, action: Action) -> None:
        now("forward" if action.kind == "F" else "backward")
        act(self, action)

    enter, make_mesh = Place.enter, run.make_mesh
    write_file, act = files.write_file, Computations.run
    Place.enter, run.make_mesh = entering, making  # type: ignore
    files.write_file, Computations.run = writing, running  # type: ignore


def join_node(node: str) -> None:
    """From now on this process has the network of a namespace; "" changes nothing."""
    if node:
        with open(f"/var/run/netns/{node}") as file:
            new_network = 0x40000000
            assert ctypes.CDLL(None).setns(file.fileno(), new_network) == 0


def rank_main(
    recipe: Recipe, rank: int, fault: tuple[int, str, str, int], folder: Path, node: str
) -> None:
    """In a process of its own."""
    join_node(node)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    with open(folder / f"{rank}.out", "w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    victim, what, phase, step = fault
    if rank == victim:
        hooked(what, phase, step, folder / "fault")
    code, found = 1, {"error": "", "losses": [], "step": 0}
    try:
        result = run.train(recipe)
        code = STATUS if result.stopped else 0
        found.update(losses=result.losses, step=result.step)
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        found["error"] = "".join(lines)
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
    part = folder / f"{rank}.part"
    part.write_text(json.dumps({**found, "time": time.time()}))
    part.rename(folder / f"{rank}.json")
    os._exit(code)


def serve_store(port: Any, node: str) -> None:
    """In a process of its own: one that has its threads could not be forked safely."""
    join_node(node)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(2 * DEADLINE)


def run_ranks(
    recipe: Recipe,
    size: int,
    fault: tuple[int, str, str, int],
    folder: Path,
    meanwhile: Callable[[list[Any]], object] = lambda processes: None,
    nodes: Sequence[str] = (),
) -> list[Ended]:
    """One `train` with a fault on a rank: (rank, fault, phase, step).

    Args:
        nodes: two network namespaces, each for half of the ranks; none unless given.
        meanwhile: called with the processes when all have been started.
    """
    fork = multiprocessing.get_context("fork")
    answer, port = fork.Pipe(duplex=False)
    names = [nodes[rank * len(nodes) // size] if nodes else "" for rank in range(size)]
    store = fork.Process(target=serve_store, args=(port, names[0]))
    store.start()
    given = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(answer.recv()),
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if nodes:
        given |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "cable"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    processes = [
        fork.Process(target=rank_main, args=(recipe, rank, fault, folder, node))
        for rank, node in enumerate(names)
    ]
    try:
        for process in processes:
            process.start()
        meanwhile(processes)
        hangs = fault[1] == "SIGSTOP"
        end = time.monotonic() + DEADLINE
        for rank, process in enumerate(processes):
            if not (hangs and rank == fault[0]):
                process.join(max(end - time.monotonic(), 0.0))
        codes = [process.exitcode for process in processes]
    finally:
        for process in (*processes, store):
            process.kill()
            process.join()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return [ended(folder, rank, code) for rank, code in enumerate(codes)]


def ended(folder: Path, rank: int, code: int | None) -> Ended:
    """What a rank has left."""
    written = folder / f"{rank}.out"
    output, path, fault = written.read_text(), folder / f"{rank}.json", folder / "fault"
    found = {"time": written.stat().st_mtime, "error": "", "losses": [], "step": 0}
    if path.exists():
        found = json.loads(path.read_text())
    begun = float(fault.read_text()) if fault.exists() else found["time"]
    return Ended(
        code, found["error"], found["time"] - begun, tuple(found["losses"]),
        found["step"], output,
    )  # fmt: skip
