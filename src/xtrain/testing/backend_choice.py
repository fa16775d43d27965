"""Which backend and device to verify, and how ranks are placed on GPUs.

    GPUs  ranks  NCCL      placement
    4     4      any       one rank per GPU
    1     4      >= 2.30   all ranks on the GPU: NCCL_MULTI_RANK_GPU_ENABLE=1
    1     4      < 2.30    refused, in one line that says what is missing
    0     -      -         gloo on the CPU

The decisions take a `Machine`, so tests decide about machines that do not exist.
"""

import ctypes
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

Version = tuple[int, int, int]

DEVICES = ("cpu", "cuda", "xgpu")  # the last one is `pretended_device`
VIRTUAL = "xtrain-virtual"  # its ranks are threads of one process
BACKENDS = ("gloo", "nccl", "nccl-rules", "xtrain-socket", "xtrain-shm", VIRTUAL)
FOR_DEVICE = {"cuda": "nccl", "xgpu": "nccl-rules"}  # unless asked for another
# Called before init_process_group, found by name: backends stand above this module.
LATE_BACKENDS = dict.fromkeys(
    ("nccl-rules", "xtrain-socket", "xtrain-shm"), "xtrain.backends:register"
)
LATE_BACKENDS[VIRTUAL] = "xtrain.cluster:register"
# A machine with fewer GPUs would skip most tests on NCCL, so gloo is the default.
ENOUGH_GPUS = 4
SHARING_NCCL: Version = (2, 30, 0)
SHARING_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a decision depends on.

    Attributes:
        fits: how many ranks the memory of a GPU takes; None where nobody has asked.
    """

    gpus: int = 0
    nccl: Version | None = None
    name: str = ""  # of the first GPU
    visible: str = ""  # CUDA_VISIBLE_DEVICES of ranks that use them
    fits: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, a device, and why."""

    backend: str
    device: str
    reason: str


@functools.cache
def this_machine() -> Machine:
    """The GPUs and the NCCL library that ranks of this process would use.

    CUDA is asked in a child: once it has begun, neither it nor autograd works in the
    ranks that are forked later.
    """
    import torch

    if not torch.backends.cuda.is_built():
        return Machine()
    if torch.cuda.is_initialized():
        gpus, name = _ask_cuda()
    else:
        context = multiprocessing.get_context("fork")
        answer = context.SimpleQueue()
        child = context.Process(target=lambda: answer.put(_ask_cuda()))
        child.start()
        child.join()
        gpus, name = answer.get() if child.exitcode == 0 else (0, "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    return Machine(gpus, _nccl_version() if gpus else None, name, visible)


def choose(backend: str | None, device: str | None, machine: Machine) -> Choice:
    """Settle what the user left open; ValueError for a pair that cannot work."""
    if backend is None and device is None:
        return _default(machine)
    if backend is None:
        backend = FOR_DEVICE.get(device or "cpu", "gloo")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if device is None:
        device = "cuda" if backend == "nccl" else "cpu"
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is none of {', '.join(DEVICES)}")
    if backend == "nccl" and device != "cuda":
        raise ValueError("nccl moves GPU memory only: use --device cuda")
    if backend == VIRTUAL and device != "cpu":
        raise ValueError(f"{VIRTUAL} keeps its ranks' tensors on the CPU")
    if backend == "gloo" and device == "xgpu":
        raise ValueError("gloo does not take tensors of xgpu: use --backend nccl-rules")
    if device == "cuda" and machine.gpus == 0:
        raise ValueError("--device cuda needs a GPU that torch can see; there is none")
    return Choice(backend, device, "as asked")


def rank_environment(size: int, choice: Choice, machine: Machine) -> dict[str, str]:
    """Environment for `size` ranks; ValueError with one line when they do not fit."""
    if choice.device != "cuda":
        return {"GLOO_SOCKET_IFNAME": loopback()}
    on_one = -(-size // machine.gpus)
    if machine.fits is not None and on_one > machine.fits:
        raise ValueError(
            f"{size} ranks put {on_one} on a GPU, whose free memory is enough for "
            f"{machine.fits}"
        )
    visible = {"CUDA_VISIBLE_DEVICES": machine.visible}
    if size <= machine.gpus or choice.backend != "nccl":
        return visible
    if machine.nccl is None or machine.nccl < SHARING_NCCL:
        found = ".".join(map(str, machine.nccl)) if machine.nccl else "unknown"
        raise ValueError(
            f"{size} ranks need {size} GPUs, there are {machine.gpus}: sharing one "
            f"needs NCCL 2.30 or newer, found {found}"
        )
    return visible | SHARING_ENVIRONMENT


def explain_sharing(choice: Choice, machine: Machine) -> str:
    """One line on worlds larger than the number of GPUs; empty without NCCL."""
    if choice.backend != "nccl":
        return ""
    larger = f"worlds larger than {machine.gpus}"
    try:
        rank_environment(machine.gpus + 1, choice, machine)
    except ValueError as misfit:
        return f"{larger} are skipped: {misfit}"
    settings = " ".join(f"{key}={value}" for key, value in SHARING_ENVIRONMENT.items())
    return f"{larger} share GPUs: {settings}"


def loopback() -> str:
    """The interface gloo should use: ranks of one machine need no other."""
    return "lo" if sys.platform == "linux" else "lo0"


def registration(backend: str) -> Callable[[], object]:
    """What makes `backend` known to torch, imported; nothing to do for torch's own.

    RuntimeError when its module is missing.
    """
    if backend not in LATE_BACKENDS:
        return lambda: None
    module, function = LATE_BACKENDS[backend].split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"backend {backend!r} needs {module}: {error.msg}"
        ) from error


def _default(machine: Machine) -> Choice:
    if machine.gpus >= ENOUGH_GPUS:
        return Choice("nccl", "cuda", f"{machine.gpus} GPUs")
    if machine.gpus == 0:
        return Choice("gloo", "cpu", "no GPU")
    sharing = machine.nccl is not None and machine.nccl >= SHARING_NCCL
    hint = "they can be shared: try" if sharing else "for small worlds try"
    few = f"{machine.gpus} of {ENOUGH_GPUS} GPUs"
    return Choice("gloo", "cpu", f"{few}; {hint} --backend nccl")


def _ask_cuda() -> tuple[int, str]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus, torch.cuda.get_device_name(0) if gpus else ""


def _nccl_version() -> Version | None:
    # Asks the library itself: torch.cuda.nccl.version() is fixed at torch's build
    # and does not see a newer libnccl put in its place.
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    value = number.value
    return value // 10_000, value // 100 % 100, value % 100
