"""How many test processes and ranks the GPUs take, and what a newer NCCL would give.

    free on each GPU   GPUs   NCCL      test processes   ranks of each on a GPU
    78 GiB             1      2.30      1                78
    78 GiB             1      2.29      4                19
    14 GiB             8      2.29      2                7
    5 GiB              1      2.30      1                5: no world of 8

The decisions take a `Machine`, so tests decide about machines that do not exist.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from xtrain.testing.backend_choice import SHARING_NCCL, Machine

# Half a GiB is its CUDA context; the rest is for the groups and tensors of tests.
RANK_BYTES = 1 << 30
WORKERS = 4
LARGEST_WORLD = 8
# Worlds that live side by side in a test process, each with a rank on the first GPU.
WORLDS = 6
PACKAGE = "nvidia-nccl-cu{cuda}==2.30.7"
FOLDER = "build/nccl"

_ASK = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(i)[0] "
    "for i in range(torch.cuda.device_count())]))"
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Test processes side by side, and how many ranks each may have on a GPU."""

    workers: int
    ranks_per_gpu: int


def fit(machine: Machine, free: Sequence[int]) -> Fit:
    """Divide the GPUs, with `free` bytes each; ValueError where not one rank fits.

    Ranks that share a GPU wait for each other in kernels that keep it busy. With
    several test processes they would time out where more than two share it, so there
    is one.
    """
    fits = min(free) // RANK_BYTES
    if fits < 1:
        raise ValueError(
            f"GPU {free.index(min(free))} has {min(free) / 2**30:.1f} GiB of free "
            "memory, and a rank takes about 1 GiB: another program may use it"
        )
    many = max(1, min(WORKERS, fits // WORLDS))
    workers = 1 if ranks_on_one(machine) > 2 else many
    return Fit(workers, fits // workers)


def ranks_on_one(machine: Machine) -> int:
    """How many ranks of the largest world that runs are on one GPU."""
    able = machine.nccl is not None and machine.nccl >= SHARING_NCCL
    return -(-LARGEST_WORLD // machine.gpus) if able else 1


def free_memory() -> list[int]:
    """Bytes that are free on each GPU; ValueError with what torch says of it.

    Asked in a process of its own, since who asks keeps half a GiB while it lives.
    """
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["torch cannot use the GPU"]
        raise ValueError(said[-1])
    return json.loads(done.stdout)


def how_to_share(machine: Machine, cuda: str | None) -> str:
    """What NCCL 2.30 would give, and how to get it; empty where nothing is missing.

    torch wants its own NCCL exactly, so the newer one is put beside it.

    Args:
        cuda: the version that torch was built for, such as "13.0".
    """
    newer = machine.nccl is not None and machine.nccl >= SHARING_NCCL
    if newer or not 0 < machine.gpus < LARGEST_WORLD or not cuda:
        return ""
    found = ".".join(map(str, machine.nccl)) if machine.nccl else "of unknown version"
    package = PACKAGE.format(cuda=cuda.partition(".")[0])
    return (
        f"NCCL {found} wants a GPU for each rank: only worlds of up to {machine.gpus} "
        "run. With 2.30 ranks share a GPU, and worlds of up to "
        f"{LARGEST_WORLD} run: pip install --no-deps --target {FOLDER} {package}; "
        f"LD_PRELOAD=$PWD/{FOLDER}/nvidia/nccl/lib/libnccl.so.2 make verify-gpu"
    )
