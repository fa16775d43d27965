"""The checks of `xtrain doctor`: each looks or tries, and returns a `Finding`.

Torch is imported by the checks that need it: the others run without.
"""

import json
import platform
import socket
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xtrain

if TYPE_CHECKING:
    from xtrain.testing.backend_choice import Machine

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
OWN_BACKENDS = ("xtrain-socket", "xtrain-shm")


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    "ok", a "note" (something is not there, and only part of xtrain needs it) or a
    "problem" (the tests cannot run).
    """

    name: str
    state: Literal["ok", "note", "problem"]
    text: str


def checkout() -> Path | None:
    """The source tree that this package runs from; None for an installed wheel."""
    folder = Path(xtrain.__file__).resolve().parents[2]
    return folder if (folder / "setup_env.py").exists() else None


def check_python() -> Finding:
    version = platform.python_version()
    text = f"{version} on {platform.platform(terse=True)} ({sys.executable})"
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return Finding("python", "problem", f"{text}: xtrain needs 3.11 or newer")
    return Finding("python", "ok", text)


def check_name() -> Finding:
    """Is the other project that is called xtrain on PyPI installed, too?"""
    ours = Path(xtrain.__file__).resolve()
    text = f"{xtrain.__version__} in {ours.parent}"
    try:
        other = metadata.distribution("xtrain")
    except metadata.PackageNotFoundError:
        return Finding("xtrain", "ok", text)
    files = [Path(str(other.locate_file(file))) for file in other.files or []]
    theirs = [f.resolve() for f in files if f.parts[-2:] == ("xtrain", "__init__.py")]
    if ours in theirs:
        return Finding(
            "xtrain",
            "problem",
            f"another project's xtrain {other.version} was installed over this one: "
            "pip uninstall xtrain, then install this one again",
        )
    if theirs:
        text += (
            f"; hides another project's xtrain {other.version} in {theirs[0].parent}"
        )
        return Finding("xtrain", "note", text)
    return Finding("xtrain", "ok", text)


def check_torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "problem", f"cannot be imported: {error}")
    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        return Finding("torch", "problem", f"{version}: xtrain needs 2.11 or newer")
    if not torch.distributed.is_available():
        return Finding("torch", "problem", f"{version} has no torch.distributed")
    return Finding("torch", "ok", f"{version} ({_build()})")


def _build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    return f"ROCm {torch.version.hip} build" if torch.version.hip else "CPU build"


def check_numpy() -> Finding:
    try:
        import numpy
    except ImportError:
        return Finding(
            "numpy", "problem", "missing; torch's object collectives need it"
        )
    return Finding("numpy", "ok", numpy.__version__)


def check_gpus() -> Finding:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            return Finding("gpus", "note", "none visible; ranks run on the CPU")
        return Finding("gpus", "note", "none: this torch is a CPU build")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(sorted(set(names)))
    return Finding("gpus", "ok", f"{len(names)}: {kinds}; try: make verify-gpu")


def _machine() -> "Machine":
    """The GPUs, and the version of the NCCL library that is loaded here."""
    from xtrain.testing.backend_choice import this_machine

    return this_machine()


def check_nccl() -> Finding:
    import torch.distributed as dist

    machine = _machine()
    if machine.nccl is not None:
        return Finding("nccl", "ok", ".".join(map(str, machine.nccl)))
    there = dist.is_nccl_available()
    why = "no GPU to use it on" if there else "not in this torch"
    if there and machine.gpus:
        why = "its library cannot be asked for its version"
    return Finding("nccl", "note", f"{why}; the tests run on gloo")


def check_sharing() -> Finding:
    """May several ranks use one GPU? Then one GPU is enough to verify on."""
    import torch

    from xtrain.testing.gpu_fit import how_to_share

    machine = _machine()
    if machine.nccl is None:
        return Finding("sharing", "note", "without NCCL no GPU is shared among ranks")
    if line := how_to_share(machine, torch.version.cuda):
        return Finding("sharing", "note", line)
    return Finding("sharing", "ok", "NCCL can run worlds of up to 8 on these GPUs")


def check_loopback() -> Finding:
    """Connect to a free port of this machine, as ranks do at start."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(5)
                    client.sendall(b"x")
                    if peer.recv(1) != b"x":
                        raise OSError("the byte that was sent did not arrive")
    except OSError as error:
        return Finding("loopback", "problem", f"127.0.0.1 does not work: {error}")
    return Finding("loopback", "ok", f"127.0.0.1 works; port {port} was free")


def check_backends() -> Finding:
    """Which backends of torch.distributed are there, torch's and ours."""
    import torch.distributed as dist

    names = ("gloo", "nccl", "mpi", "ucc")
    there = [name for name in names if dist.is_backend_available(name)]
    missing = [name for name in names if name not in there]
    text = f"torch has {', '.join(there) or 'none'}"
    text += f", not {', '.join(missing)}" if missing else ""
    return Finding("backends", "ok", f"{text}; ours: {', '.join(OWN_BACKENDS)}")


def _sum_of_ranks() -> int:
    """Runs on every rank of the trial World."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    return int(tensor.item())


def check_gloo() -> Finding:
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return Finding("gloo", "problem", "this torch was built without gloo")
    return check_backend("gloo")


def check_backend(backend: str) -> Finding:
    """Start two ranks on a CPU backend and add up a tensor across them."""
    from xtrain.testing import World

    started = time.perf_counter()
    try:
        with World(2, backend) as world:
            sums = world.run(_sum_of_ranks)
    except Exception as error:
        return Finding(backend, "problem", f"two ranks could not all-reduce: {error}")
    seconds = time.perf_counter() - started
    if sums != [3, 3]:
        return Finding(backend, "problem", f"1 + 2 across two ranks gave {sums}")
    return Finding(backend, "ok", f"two ranks all-reduced, {seconds:.1f} s with start")


def record_folder() -> Path:
    """Where a test run writes the verification record."""
    return (checkout() or Path.cwd()) / "build" / "verification"


def check_record() -> Finding:
    folder = record_folder()
    files = sorted(folder.glob("*.json"))
    if not files and not checkout():
        return Finding(
            "record", "note", "none; the tests, which write it, come with the source"
        )
    if not files:
        return Finding("record", "note", f"none in {folder}; `make test` writes it")
    texts = []
    for file in files:
        try:
            record = json.loads(file.read_text())
            about = record["about"]
            symbols = {
                symbol
                for entry in record["entries"].values()
                for symbol, places in entry["value"]["ran"].items()
                if places is not None
            }
            texts.append(
                f"{file} ({len(symbols)} symbols, {about['created'][:10]}, "
                f"torch {about['torch']})"
            )
        except (ValueError, KeyError, TypeError) as error:
            return Finding("record", "problem", f"{file} cannot be read: {error!r}")
    return Finding("record", "ok", "; ".join(texts))
