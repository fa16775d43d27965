"""A device for tests on machines without one: "xgpu", whose memory is the CPU's.

    x = torch.ones(3, device="xgpu")
    x + torch.ones(3)      # RuntimeError: Expected all tensors on the same device

What a program forgets on its way to a GPU breaks on it: a `device=`, a generator, an
autocast. Its backward pass runs on threads of its own, where no ContextVar of the
program is set. Kernels are the CPU's, so results are, too, bit by bit.

Streams and events are there and order nothing: every kernel ends before its call
returns. Sparse and quantized tensors, pinned memory and captured graphs are not there.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "xgpu"
SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O1")
DEVICES = 8  # as in SOURCE
DTYPES = (torch.float16, torch.bfloat16)  # of autocast


def build() -> Path:
    """The compiled device, from the cache of earlier builds where it is there.

    RuntimeError where it cannot be compiled: no compiler, or not Linux.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if sys.platform != "linux" or compiler is None:
        raise RuntimeError(f'device "{NAME}" needs Linux and a C++ compiler (g++)')
    key = "\0".join((SOURCE.read_text(), torch.__version__, platform.machine(), *FLAGS))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xtrain"
    library = cache / f"{NAME}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            _compile(compiler, made)
            made.replace(library)
    return library


def _compile(compiler: str, library: Path) -> None:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        compiler, *FLAGS, abi, f"-I{root / 'include'}", str(SOURCE), "-o", str(library),
        f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        text = "\n".join(errors[:5]) or result.stderr[-2000:]
        raise RuntimeError(f'device "{NAME}" did not compile: {text}')


@functools.cache
def register() -> None:
    """Make the device known to torch in this process, which then must not fork."""
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.xtrain_pretended.start_threads()


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of one of this device."""
    return torch.ops.xtrain_pretended.host_view(tensor.detach())


class PretendedStream(torch.Stream):
    """As torch.cuda.Stream: made for this device unless another one is given."""

    def __new__(cls, device: Any = NAME, priority: int = 0) -> "PretendedStream":
        return super().__new__(cls, device=torch.device(device), priority=priority)


class PretendedEvent(torch.Event):
    """As torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> "PretendedEvent":
        return super().__new__(cls, torch.device(NAME), enable_timing=enable_timing)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(NAME if device is None else device).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(device: Any = None) -> torch.Generator:
    return torch.ops.xtrain_pretended.default_generator(_index(device))


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _generator(index).manual_seed(seed)


def _module() -> types.ModuleType:
    """`torch.xgpu`: what torch's own device modules have and programs call."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: DEVICES,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(_index(device)),
        device=_device,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        Stream=PretendedStream,
        Event=PretendedEvent,
        current_stream=accelerator.current_stream,
        default_stream=accelerator.current_stream,
        set_stream=accelerator.set_stream,
        stream=lambda stream: stream or contextlib.nullcontext(),
        manual_seed=lambda seed: _generator().manual_seed(seed),
        manual_seed_all=_manual_seed_all,
        initial_seed=lambda: _generator().initial_seed(),
        get_rng_state=lambda device=None: _generator(device).get_state(),
        get_rng_state_all=lambda: [_generator(i).get_state() for i in range(DEVICES)],
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        get_amp_supported_dtype=lambda: list(DTYPES),
        is_bf16_supported=lambda: True,
        host_view=host_view,
    )
    return module
