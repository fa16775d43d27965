"""One pass around a ring: send to the next rank, receive from the one before.

    step 0    this rank's x leaves for the next rank    x of rank - 1 arrives
    step 1    x of rank - 1 leaves                      x of rank - 2 arrives ...

    ring = RingPass(group)
    arriving = ring.pass_on(x)    # issue
    use(x)                        # compute
    ring.wait()                   # wait; `arriving` is filled

After N - 1 steps every rank has seen every rank's tensor. A step that needs only what
arrives calls `wait_recv`, and `wait` before memory that was sent is written again.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world, rank_and_size
from xtrain.comm.p2p import follows_nccl, post_all, wait_all


class RingPass:
    """Messages to the next rank of a ring and from the one before.

    Finished messages are kept until the next `wait`: gloo spins to free a message that
    has only just arrived.
    """

    def __init__(self, group: ProcessGroup | None = None):
        self.rank, self.size = rank_and_size(group)
        self._group = group_or_world(group)
        self._ahead: list[list[dist.Work]] = []  # receives posted before their step
        self._arriving: list[dist.Work] = []
        self._leaving: list[dist.Work] = []
        self._arrived: list[dist.Work] = []
        self._kept: list[dist.Work] = []  # finished

    def post_recvs(self, tensors: Sequence[Tensor]) -> None:
        """Post the receives of the next steps, in order, before anything is sent.

        A message that finds its receive posted flows at once; otherwise it costs a
        round trip more. Backends that batch (NCCL) post nothing here.
        """
        before = (self.rank - 1) % self.size
        for tensor in tensors:
            if follows_nccl(self._group, tensor.device):
                return
            self._ahead.append(post_all([], [(tensor, before)], self._group))

    def start(self, send: Tensor, recv: Tensor, by: int = 1) -> None:
        """Begin to send to rank + by and to receive from rank - by. Both contiguous."""
        after, before = (self.rank + by) % self.size, (self.rank - by) % self.size
        if self._ahead:
            self._arriving += self._ahead.pop(0)
            self._leaving += post_all([(send, after)], [], self._group)
            return
        works = post_all([(send, after)], [(recv, before)], self._group)
        receives = min(1, recv.numel())  # it comes first; empty: no message
        self._arriving += works[:receives]
        self._leaving += works[receives:]

    def pass_on(self, x: Tensor, by: int = 1) -> Tensor:
        """Begin to send `x`; returns the tensor that holds the other one after `wait`.

        `x` must not change until then. A whole number of turns returns `x` itself.
        """
        if by % self.size == 0:
            return x
        arriving = torch.empty_like(x)
        self.start(x, arriving, by)
        return arriving

    def wait_recv(self) -> None:
        """Wait until everything has arrived. What was sent may still be leaving."""
        wait_all(self._arriving)
        self._arrived += self._arriving
        self._arriving = []

    def wait(self) -> None:
        """Wait until everything has arrived and left."""
        self.wait_recv()
        wait_all(self._leaving)
        self._kept = self._arrived + self._leaving
        self._arrived, self._leaving = [], []

    def visits(
        self, x: Tensor, steps: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """(rank, its `x`) of `steps` ranks, all by default, from this one backwards.

        While one is used, the next is on its way.
        """
        x, steps = x.detach().contiguous(), steps or self.size
        for step in range(steps - 1):
            arriving = self.pass_on(x)  # issue
            yield (self.rank - step) % self.size, x  # compute
            self.wait()
            x = arriving
        yield (self.rank - steps + 1) % self.size, x
