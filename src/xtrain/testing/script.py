"""Run a snippet as its first line asks, without starting Python again.

    # torchrun --nproc-per-node 4 snippets/lc1/ring.py    -> 4 processes
    # python snippets/lc1/mesh.py                         -> 1 process

The processes are forked from this one, which has torch imported already: 0.2 s
instead of torchrun's 4 s. They get torchrun's environment, rendezvous through a
store that this process serves (as torchrun's agent does), and run the file as __main__.
"""

import atexit
import ctypes
import os
import random
import runpy
import shlex
import socket
import sys
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.evidence import executed
from xtrain.testing import pretended_device
from xtrain.testing.backend_choice import loopback, registration, this_machine
from xtrain.testing.files import SharedFile
from xtrain.testing.outcome import Outcome, failure
from xtrain.testing.process import RankProcess
from xtrain.testing.supervise import collect, explain


@dataclass(frozen=True, slots=True)
class Command:
    """What the first line of a snippet asks for; `ranks` is None for python."""

    ranks: int | None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptSpec:
    """What one process of a script must know."""

    path: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    stdout: str
    backend: str
    device: str
    watched: executed.Codes = field(default_factory=dict)


def read_command(path: str | os.PathLike[str]) -> Command:
    """Parse the command on the first line; ValueError when there is none."""
    with open(path, encoding="utf-8") as file:
        first = file.readline().strip()
    words = shlex.split(first.removeprefix("#")) if first.startswith("#") else []
    if words[:1] == ["torchrun"] and len(words) > 1:
        # Both --nproc-per-node 4 and --nproc_per_node=4 are torchrun's.
        words[1:2] = words[1].replace("_", "-").split("=", 1)
        option, count, *rest = [*words[1:], "", ""]
        if (
            option == "--nproc-per-node"
            and count.isdecimal()
            and int(count)
            and rest[0]
        ):
            return Command(int(count), tuple(words[4:]))
    elif words[:1] == ["python"] and len(words) > 1:
        return Command(None, tuple(words[2:]))
    raise ValueError(
        f"{path}: the first line must be '# torchrun --nproc-per-node N FILE' or "
        f"'# python FILE', not {first!r}"
    )


def run_script(
    path: str | os.PathLike[str],
    timeout: float | None = 30.0,
    backend: str = "gloo",
    device: str = "cpu",
) -> list[str]:
    """Run the snippet at `path` and return each rank's stdout, in rank order.

    `backend` is what torch answers to a script that asks for the default one of this
    type of device. With "cuda" the script sees the GPUs of this machine, with "xgpu"
    eight of the pretended devices.
    Raises RankError when a rank ends with an exception (also an instance of its
    type) or a nonzero exit code, RankTimeout after `timeout` seconds. What ranks
    write to stderr goes to this process's stderr.
    """
    command = read_command(path)
    size = command.ranks or 1
    if device == pretended_device.NAME:
        pretended_device.build()  # once, and not in each process
    seen = executed.current()
    watched = seen.codes if seen else {}
    outputs = [SharedFile("stdout") for _ in range(size)]
    ranks: list[RankProcess] = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
            port = listener.getsockname()[1]
            for rank, output in enumerate(outputs):
                environment = _environment(rank, size, port) if command.ranks else {}
                if device == "cuda":
                    environment["CUDA_VISIBLE_DEVICES"] = this_machine().visible
                spec = ScriptSpec(
                    str(path),
                    command.arguments,
                    environment,
                    output.path,
                    backend,
                    device,
                    watched,
                )
                name = f"{Path(path).name} rank {rank}"
                fork = sys.platform == "linux" and not torch.cuda.is_initialized()
                ranks.append(RankProcess(name, script_main, spec, fork))
            # Only now: a thread serves the store, and a child that was forked while it
            # held a lock (the C library's, for example) would wait for it forever.
            store = _serve_store(listener)
            ending = collect(ranks, timeout)
            del store
            if seen:
                for answer in ending.answers.values():
                    seen.on_ranks(answer.executed, backend, size)
            if not ending.complete(size):
                raise explain(str(path), ranks, ending, timeout)
        return [output.take() for output in outputs]
    finally:
        for process in ranks:
            sys.stderr.write(process.take_stderr())
            process.kill()
        for process in ranks:
            process.close()
        for output in outputs:
            output.close()


def script_main(spec: ScriptSpec, jobs: Connection) -> None:
    """Body of a script's process: look like a fresh interpreter, then run it."""
    stdout = os.open(spec.stdout, os.O_WRONLY | os.O_APPEND)
    os.dup2(stdout, 1)
    os.environ.update(spec.environment)
    atexit._clear()  # the functions there belong to the parent
    # A new interpreter has random seeds; a snippet that forgot its own must show it.
    torch.seed()
    random.seed()
    torch.set_num_threads(1)
    registration(spec.backend)()
    if spec.device == pretended_device.NAME:
        pretended_device.register()
    dist.Backend.default_device_backend_map[spec.device] = spec.backend
    sys.argv = [spec.path, *spec.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(spec.path)))
    with executed.watching_code(spec.watched) as seen:
        try:
            runpy.run_path(spec.path, run_name="__main__")
            outcome = Outcome("returned")
        except SystemExit as stop:
            outcome = Outcome("returned") if not stop.code else failure(stop)
        except BaseException as error:
            outcome = failure(error)
        atexit._run_exitfuncs()
    _flush()
    jobs.send(replace(outcome, executed=tuple(seen.places)))


def _serve_store(listener: socket.socket) -> dist.TCPStore:
    """The rendezvous store, on a port that is listened on already."""
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback(),
    }


def _flush() -> None:
    """Write out what Python and C still hold back; the process ends without it."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
