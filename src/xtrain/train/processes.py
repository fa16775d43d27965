"""The ranks of a run: those of torchrun, or this process alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def ranks(device: str = "auto", timeout: float | None = None) -> Iterator[torch.device]:
    """Join the other ranks, if torchrun started some; the device of this one.

    A default group that is there already is used, and stays.

    Args:
        device: "cpu", "cuda", or "auto": the accelerator if each rank of this machine
            can have one.
        timeout: seconds of a call of the group that is made here and of the mesh's;
            torch's own if None.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    chosen = choose_device(device)
    if dist.is_initialized():
        yield chosen
        return
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    backend = dist.get_default_backend_for_device(chosen)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield chosen
    finally:
        dist.destroy_process_group()


def choose_device(device: str) -> torch.device:
    """ValueError if it is not there."""
    local, here = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    count = torch.accelerator.device_count()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and count >= here else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or count <= local:
        raise ValueError(
            f"device={device!r}: rank {local} of this machine has none, there are "
            f"{count}"
        )
    return torch.device(device, local)
