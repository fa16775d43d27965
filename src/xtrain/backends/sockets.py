"""The transport of ranks that are connected by sockets: every rank with every other.

Each call begins with the headers of `socket_calls`. Small tensors are sent inline, with
them; large ones run around a ring (`ring_stream`) or along a chain.
"""

from array import array

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.calls import CollectiveMismatch
from xtrain.backends.messages import raw, read_all, write_all
from xtrain.backends.operation import Steps, interleave
from xtrain.backends.ring_stream import RingStream
from xtrain.backends.socket_calls import INLINE_BYTES, SocketCalls
from xtrain.comm.reduce_op import reduce_into


class Sockets(SocketCalls):
    """The transport of one group.

    Its collectives take flat contiguous tensors, and the call's fingerprint as `check`.
    """

    def barrier(self, check: int) -> Steps:
        yield from self.exchange_headers(check)

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if flat.nbytes <= INLINE_BYTES:
            payloads = yield from self.exchange_headers(
                check, dict.fromkeys(self.others, flat)
            )
            mine = flat.clone()
            shares = [
                mine if rank == self.rank else typed(payloads[rank], flat.dtype)
                for rank in range(self.size)
            ]
            reduce_into(flat, shares, op)  # in rank order: all ranks get the same bits
            return
        yield from self.exchange_headers(check)
        chunks = list(flat.tensor_split(self.size))
        yield from self._ring(chunks, op, reduce=True, gather=True)

    def reduce(
        self, flat: Tensor, root: int, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        copy = flat if self.rank == root else flat.clone()
        yield from self.all_reduce(copy, op, check)

    def reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        yield from self.exchange_headers(check)
        chunks = [chunk.clone() for chunk in inputs]
        yield from self._ring(chunks, op, reduce=True, gather=False)
        output.copy_(chunks[self.rank])

    def all_gather(self, outputs: list[Tensor], input: Tensor, check: int) -> Steps:
        yield from self.exchange_headers(check)
        outputs[self.rank].copy_(input)
        yield from self._ring(outputs, ReduceOp.SUM, reduce=False, gather=True)

    def broadcast(self, flat: Tensor, root: int, check: int) -> Steps:
        if flat.nbytes > INLINE_BYTES:
            yield from self.exchange_headers(check)
            yield from self._chain(raw(flat), root)
            return
        inline = dict.fromkeys(self.others, flat) if self.rank == root else None
        payloads = yield from self.exchange_headers(check, inline)
        if self.rank != root:
            flat.copy_(typed(payloads[root], flat.dtype))

    def _chain(self, data: memoryview, root: int) -> Steps:
        """From the root to the right, each rank passing the beginning on at once."""
        hops = (self.rank - root) % self.size
        last = hops == self.size - 1
        have, sent = data.nbytes if hops == 0 else 0, 0
        self.received += data.nbytes - have
        self.sent += 0 if last else data.nbytes
        while have < data.nbytes or (sent < data.nbytes and not last):
            moved = 0
            if have < data.nbytes:
                left = self.collective[(self.rank - 1) % self.size]
                moved += left.read(data[have:])
                have += moved
            if sent < have and not last:
                right = self.collective[(self.rank + 1) % self.size]
                count = right.write(data[sent:have])
                sent, moved = sent + count, moved + count
            if not moved:
                yield

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        yield from self._agree_on_sizes(outputs, inputs, check)
        outputs[self.rank].copy_(inputs[self.rank])
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.sent += sum(inputs[peer].nbytes for peer in order)
        self.received += sum(outputs[peer].nbytes for peer in order)
        yield from interleave(
            [write_all(self.collective[peer], raw(inputs[peer])) for peer in order]
            + [read_all(self.collective[peer], raw(outputs[peer])) for peer in order]
        )

    def _agree_on_sizes(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        """CollectiveMismatch, on all ranks, when one expects what is not sent."""
        counts = array("q", [t.numel() for t in (*inputs, *outputs)])
        mine = torch.frombuffer(counts, dtype=torch.int64)
        before = self.sent, self.received
        payloads = yield from self.exchange_headers(
            check, dict.fromkeys(self.others, mine)
        )
        self.sent, self.received = before  # no tensor's bytes
        rows = [
            mine if rank == self.rank else typed(payloads[rank], torch.int64)
            for rank in range(self.size)
        ]
        sends, receives = torch.stack(rows).split(self.size, dim=1)
        if not torch.equal(sends, receives.T):
            raise CollectiveMismatch

    def _ring(
        self, chunks: list[Tensor], op: ReduceOp.RedOpType, reduce: bool, gather: bool
    ) -> Steps:
        if self.size == 1:
            return
        ring = RingStream(chunks, self.rank, op, reduce, gather)
        self.sent += ring.bytes_to_send
        self.received += ring.bytes_to_receive
        right = self.collective[(self.rank + 1) % self.size]
        left = self.collective[(self.rank - 1) % self.size]
        yield from ring.steps(right, left)


def typed(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
