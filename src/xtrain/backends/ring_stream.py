"""The ring of lc1 as one stream: no rank waits for a whole chunk before it sends.

    rank r    receives a piece from rank r - 1, reduces it into its own,
              and sends the reduced prefix on while the rest still arrives

Each rank sends and receives the ring's share: (N-1)/N of the tensor for a
reduce-scatter, as much again for an all-gather.
"""

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.connections import Connection
from xtrain.backends.messages import BLOCK_BYTES, raw
from xtrain.backends.operation import Steps
from xtrain.comm.reduce_op import divide_if_average, fold_into


class RingStream:
    """One rank's part of a ring.

    The chunk that a rank sends k-th is the one it received one hop earlier, and no byte
    of it leaves before it has been received (and reduced).

    Args:
        chunks: the tensor of this rank, cut into a chunk for each rank.
        reduce: run the hops of a reduce-scatter.
        gather: run the hops of an all-gather, after those of the reduce-scatter if any.
    """

    def __init__(
        self,
        chunks: list[Tensor],
        rank: int,
        op: ReduceOp.RedOpType,
        reduce: bool,
        gather: bool,
    ):
        self._op, self._size = op, len(chunks)
        hops = self._size - 1
        self._reduced = hops if reduce else 0  # so many received chunks are reduced
        self._last = hops * (reduce + gather)
        first = rank - 1 if reduce else rank
        order = [(first - hop) % self._size for hop in range(self._last + 1)]
        self._chunks = [chunks[index] for index in order]
        self._views = [raw(chunk) for chunk in self._chunks]
        self._ready = [0] * len(order)  # bytes of each chunk that may be sent
        self._ready[0] = self._views[0].nbytes
        self._sending, self._sent = 0, 0  # which chunk, and how much of it has left
        self._receiving, self._filled = 1, 0  # which chunk; bytes in the block
        itemsize = chunks[0].element_size()
        self._block = torch.empty(BLOCK_BYTES // itemsize, dtype=chunks[0].dtype)
        self._block_view = raw(self._block)
        self.bytes_to_send = sum(view.nbytes for view in self._views[:-1])
        self.bytes_to_receive = sum(view.nbytes for view in self._views[1:])

    def steps(self, right: Connection, left: Connection) -> Steps:
        """Send to the right and receive from the left until all chunks are through."""
        while self._sending < self._last or self._receiving <= self._last:
            sent = self._send(right)
            received = self._receive(left)
            if not sent and not received:
                yield

    def _send(self, right: Connection) -> bool:
        """Write what may leave of the current chunk; True if something moved."""
        if self._sending == self._last:
            return False
        view, ready = self._views[self._sending], self._ready[self._sending]
        count = right.write(view[self._sent : ready]) if self._sent < ready else 0
        self._sent += count
        if self._sent < view.nbytes:
            return count > 0
        self._sending, self._sent = self._sending + 1, 0
        return True

    def _receive(self, left: Connection) -> bool:
        """Read what has come of the current chunk; True if something moved."""
        if self._receiving > self._last:
            return False
        view, have = self._views[self._receiving], self._ready[self._receiving]
        if have == view.nbytes:
            self._receiving += 1
            return True
        if self._receiving <= self._reduced:
            return self._receive_and_reduce(left, view.nbytes - have)
        count = left.read(view[have:])
        self._ready[self._receiving] += count
        return count > 0

    def _receive_and_reduce(self, left: Connection, missing: int) -> bool:
        """Fill the block, which a core's own cache holds; reduce it once it is full."""
        want = min(missing, BLOCK_BYTES)
        count = left.read(self._block_view[self._filled : want])
        self._filled += count
        if self._filled == want:
            chunk, have = self._chunks[self._receiving], self._ready[self._receiving]
            start, length = have // chunk.element_size(), want // chunk.element_size()
            target = chunk[start : start + length]
            fold_into(target, self._block[:length], self._op)
            if self._receiving == self._reduced:  # complete, before any of it leaves
                divide_if_average(target, self._op, self._size)
            self._ready[self._receiving], self._filled = have + want, 0
        return count > 0
