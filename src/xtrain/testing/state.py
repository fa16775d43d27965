"""What a test may change in a rank, and how the next test finds it unchanged."""

import os
import random
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from xtrain.testing.rank import Seat

SEED = 20_000


class Clean:
    """The state of a rank right after it joined, to return to between tests."""

    def __init__(self, seat: "Seat") -> None:
        self.rank = seat.rank
        self.group = dist.group.WORLD
        self.environ = dict(os.environ)
        self.directory = os.getcwd()
        self.dtype = torch.get_default_dtype()

    def group_intact(self) -> bool:
        """Whether the default group is still the one the rank joined."""
        return dist.is_initialized() and dist.group.WORLD is self.group

    def restore(self) -> None:
        """Undo what tests commonly change."""
        self._destroy_extra_groups()
        # Different on every rank: a forgotten broadcast must not pass by luck.
        torch.manual_seed(SEED + self.rank)
        random.seed(SEED + self.rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED + self.rank)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        torch.autograd.set_detect_anomaly(False)
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.directory)

    def _destroy_extra_groups(self) -> None:
        for group in list(distributed_c10d._world.pg_map):
            if group is not self.group:
                dist.destroy_process_group(group)
