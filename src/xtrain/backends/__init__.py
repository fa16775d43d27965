"""lc1: torch.distributed backends in Python, over shared memory and over sockets."""

from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import Store

from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.shared_memory import SharedMemory
from xtrain.backends.sockets import Sockets

TRANSPORTS = {"xtrain-shm": SharedMemory, "xtrain-socket": Sockets}


def register() -> None:
    """Make the backends known to torch: `dist.init_process_group("xtrain-shm")`."""
    for name in TRANSPORTS:
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, partial(_create, name), devices=["cpu"])


def _create(
    name: str, store: Store, rank: int, size: int, timeout: timedelta
) -> XtrainProcessGroup:
    return XtrainProcessGroup(name, TRANSPORTS[name], store, rank, size, timeout)
