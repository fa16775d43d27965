"""A ring on which tensors go round while they are used.

    step 0    use x of this rank          it is on its way to the next rank
    step 1    use x of the rank before    which is on its way on ...

N - 1 hops show every block to every rank. The transfer of the next step begins before
this step's x is used, and is waited for afterwards.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.p2p import post_all


class Rotation(NamedTuple):
    """A tensor on its way to the next rank, and what arrives meanwhile.

    Keep it for one step after the wait: gloo frees a message that has only just arrived
    by spinning until its own thread lets go of it.
    """

    sent: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


class Ring:
    """The ranks of a group in a circle."""

    def __init__(self, group: ProcessGroup | None):
        self.group = group
        self.rank, self.size = rank_and_size(group)

    def rotate(self, x: Tensor, by: int = 1) -> Rotation:
        """Begin to send `x` `by` ranks on; it must stay as it is until the wait."""
        if by % self.size == 0:
            return Rotation(x, x, [])
        arriving = torch.empty_like(x)
        after, before = (self.rank + by) % self.size, (self.rank - by) % self.size
        works = post_all([(x, after)], [(arriving, before)], self.group)
        return Rotation(x, arriving, works)

    def visits(
        self, x: Tensor, steps: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Each rank and its `x` in turn, or those of `steps` ranks, from this one
        backwards; while one is used, the next travels."""
        kept, steps = None, steps or self.size
        for step in range(steps):
            travels = self.rotate(x) if step < steps - 1 else None
            yield (self.rank - step) % self.size, x
            if travels is not None:
                x, kept = travels.wait(), travels
        del kept
