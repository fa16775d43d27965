"""The steps of a ring: send to the next rank, receive from the one before.

    step 0    chunk c on its way to the next rank    chunk c - 1 arrives
    step 1    chunk c - 1 on its way                 chunk c - 2 arrives ...

A step needs what *arrived* in the one before, not that everything has left: so a step
waits for its receive alone, and `wait_sends` for the rest. Where no memory is used
twice, `post_recvs` posts the receives of all steps before anything is sent.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world, rank_and_size
from xtrain.comm.p2p import batches, post_all, wait_all


class RingSteps:
    """One journey around a ring: to the next rank, and from the one before.

    What has arrived is kept until `wait_sends`: gloo spins to free what is just there.
    """

    def __init__(self, group: ProcessGroup | None = None):
        rank, size = rank_and_size(group)
        self._group = group_or_world(group)
        self._after, self._before = (rank + 1) % size, (rank - 1) % size
        self._ahead: list[list[dist.Work]] = []  # receives
        self._taken: list[tuple[list[dist.Work], list[dist.Work]]] = []  # both ways

    def post_recvs(self, tensors: Sequence[Tensor]) -> None:
        """Post the receives of the next steps, in order, before anything is sent.

        A message that finds its receive posted flows at once; otherwise its sender is
        first told so, and that takes a round trip. Backends that batch (NCCL) post
        nothing here.
        """
        for tensor in tensors:
            if batches(self._group, tensor.device):
                return
            self._ahead.append(post_all([], [(tensor, self._before)], self._group))

    def send_recv(self, send: Tensor, recv: Tensor) -> None:
        """Take a step; return once `recv` is filled. `send` may still be on its way."""
        if self._ahead:
            arriving = self._ahead.pop(0)
            leaving = post_all([(send, self._after)], [], self._group)
        else:
            works = post_all([(send, self._after)], [(recv, self._before)], self._group)
            receives = min(1, recv.numel())  # it comes first; empty: no message
            arriving, leaving = works[:receives], works[receives:]
        wait_all(arriving)
        self._taken.append((arriving, leaving))

    def wait_sends(self) -> None:
        """Wait until everything has left; then what was sent may be overwritten."""
        for _, leaving in self._taken:
            wait_all(leaving)
        self._taken = []
