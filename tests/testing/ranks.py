"""Functions that the tests of this folder run on ranks: good, bad and ugly ones."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.testing.processes import wait_until

PLAIN_SLEEP = 60.0


def ranks_sum() -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), total


def pid() -> int:
    return os.getpid()


def add(a: torch.Tensor, b: int) -> torch.Tensor:
    return a + b * dist.get_rank()


def slice_of_a_big_one() -> torch.Tensor:
    return torch.zeros(1_000_000)[10:20].requires_grad_()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0)[2:4], requires_grad=False)


def raise_everywhere() -> None:
    raise ValueError(f"7 is not divisible by {dist.get_world_size()}")


def bad_key() -> None:
    raise KeyError("bad")


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad split on rank {rank}")
    dist.barrier()


def raise_after_sending() -> None:
    dist.barrier()
    raise ValueError("too late")


class PickyError(ValueError):
    """Cannot be made from its message alone, so it does not unpickle."""

    def __init__(self, needed: int, found: int) -> None:
        super().__init__(f"needed {needed}, found {found}")


def raise_picky() -> None:
    raise PickyError(3, found=4)


class MuteError(ValueError):
    """Fails while it is printed."""

    def __str__(self) -> str:
        raise KeyError(self.args)


def raise_mute() -> None:
    raise MuteError(7)


class ProudError(ValueError):
    """Travels, but nothing that inherits from it can be made."""

    def __new__(cls, *, code: int) -> "ProudError":
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        super().__init__(code)

    def __reduce__(self) -> tuple[object, ...]:
        return proud, self.args


def proud(code: int) -> ProudError:
    return ProudError(code=code)


def raise_proud() -> None:
    raise proud(7)


def fork_and_leave(how: str) -> list[int]:
    """Start two processes that outlive this call, and sometimes this rank."""
    started = subprocess.Popen(["sleep", str(PLAIN_SLEEP)])
    forked = os.fork()
    if not forked:
        time.sleep(PLAIN_SLEEP)
        os._exit(0)
    pids = [started.pid, forked]
    if how == "exit":
        sys.stderr.write(f"left {pids}")
        sys.stderr.flush()
        os._exit(3)
    return pids


def exit_with(code: int) -> None:
    os._exit(code)


def kill_self(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash_in_a_thread() -> None:
    """The rank's own thread waits for a message; a second thread aborts the process."""

    own = threading.get_ident()

    def receives() -> bool:
        frame = sys._current_frames()[own]
        while frame and frame.f_code is not receive_from.__code__:
            frame = frame.f_back
        return frame is not None

    def crash_here() -> None:
        wait_until(receives)
        os.abort()

    threading.Thread(target=crash_here).start()
    receive_from(torch.zeros(3), 1 - dist.get_rank())


def mismatched_sizes() -> None:
    dist.all_reduce(torch.ones(4 if dist.get_rank() else 1000))


def receive_from(buffer: torch.Tensor, src: int) -> list[float]:
    dist.recv(buffer, src)
    return buffer.tolist()  # NCCL's recv returns at once: reading waits


def four_ways_to_hang() -> None:
    rank = dist.get_rank()
    x = torch.zeros(3)
    if rank == 0:
        receive_from(x, 2)
    elif rank == 1:
        handle = dist.irecv(x, src=0)
        handle.wait()
    elif rank == 2:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    else:
        time.sleep(PLAIN_SLEEP)


def hang_with_the_lock_held() -> None:
    if dist.get_rank() == 0:
        ctypes.PyDLL(None).sleep(60)
    dist.barrier()


def stop_self() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def hang_after_touching(path: str) -> None:
    Path(path, str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        time.sleep(PLAIN_SLEEP)
    dist.barrier()


def write_to_stderr() -> None:
    print(f"warning from rank {dist.get_rank()}", file=sys.stderr)
    os.write(2, b"and from C\n")


def change_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    os.environ["XTRAIN_LEFTOVER"] = "1"
    os.environ.pop("PATH")
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    warnings.simplefilter("error")
    torch.rand(7)


def look_at_state() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "filters": list(warnings.filters),
        "random": torch.rand(3).tolist(),
    }


def leave_a_group_behind() -> int:
    group = dist.new_group(range(dist.get_world_size()), timeout=timedelta(seconds=9))
    dist.barrier(group=group)
    return os.getpid()


def destroy_the_default_group() -> int:
    dist.barrier()
    dist.destroy_process_group()
    return os.getpid()


def use_a_mesh() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("a", "b"))
    matrix = torch.arange(16.0).reshape(4, 4)
    split = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
    whole = (split @ split).redistribute(mesh, [Replicate(), Replicate()])
    return float((whole.to_local() - matrix @ matrix).abs().max())
