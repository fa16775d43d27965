"""How much memory a contestant takes, beyond what its process took before.

    resident        ______________/\\__/\\__/\\__      <- peak of the steps
                   /  make, first step
    ______________/                                 <- before the model exists

In a race all contestants live in one process, where one cannot tell whose memory is
whose. So each runs once more in processes of its own. The first step comes before the
peak is looked for: it makes the optimizer's state, which stays. What counts is memory
the kernel really gave, so buffers of gloo and shared segments are in it.
"""

import contextlib
import ctypes
import re
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.bench.race import Case, Contestant, synchronize

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_on_rank(contestant: Contestant, case: Case, steps: int) -> int | None:
    """Bytes at the peak of `steps` calls; None where the system does not tell."""
    if torch.device(case.device).type == "cuda":
        before = torch.cuda.memory_allocated()
        trial = contestant.make(case)
        trial.call()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            trial.call()
        return torch.cuda.max_memory_allocated() - before
    if not _RESET.exists():
        return None
    give_back_free_memory()
    before = resident("VmRSS")
    trial = contestant.make(case)
    trial.call()
    give_back_free_memory()
    dist.barrier()
    _RESET.write_text("5")  # from now on VmHWM is the peak
    for _ in range(steps):
        trial.call()
    synchronize(case.device)
    dist.barrier()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the peak."""
    found = re.search(rf"{field}:\s*(\d+) kB", _STATUS.read_text())
    assert found is not None, f"no {field} in {_STATUS}"
    return int(found[1]) * 1024


def give_back_free_memory() -> None:
    """Have the C library return unused memory to the kernel."""
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
