"""The tensors of a call in flight: what it reads, what it writes, and when.

A call of NCCL reads its inputs when its turn comes and fills its outputs when it ends;
until the program has waited for it, both belong to the call. So a call here works on
copies. Its results reach the program's tensors when it is waited for; until then an
output of floating-point numbers holds NaN, so a value that is read too early shows.
What the program has written in the meantime is found by comparing bytes: all views of
a tensor share its version counter, also those that the call does not use.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from xtrain.backends.arguments import host_view
from xtrain.backends.messages import raw


class Buffers:
    """The tensors of one call.

    Args:
        inputs: the call reads them.
        outputs: the call reads and writes them.
        in_flight: the program runs on before the call ends.

    `working` are what the call works on, outputs before inputs: copies for a call in
    flight. `begin` fills them, at once, or at the call's turn if an earlier call of its
    queue still has to write what this one reads.
    """

    def __init__(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], in_flight: bool
    ):
        # As with NCCL, autograd does not learn of what is written: `data` has a version
        # counter of its own.
        self.outputs = [tensor.data for tensor in outputs]
        self.inputs = [tensor.detach() for tensor in inputs]
        self.working = [*self.outputs, *self.inputs]
        self._in_flight = in_flight
        if in_flight:
            self.working = [torch.empty_like(tensor) for tensor in self.working]
        self._seen: list[bytes] = []  # what they hold until the program is answered

    def begin(self) -> None:
        """Copy what the call reads, and hide what it is going to write."""
        if self._seen or not self._in_flight:
            return
        tensors = [*self.outputs, *self.inputs]
        for copy, tensor in zip(self.working, tensors, strict=True):
            copy.copy_(tensor)
        if not overlapping(self.outputs, self.inputs):
            for tensor in self.outputs:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        self._seen = [bytes(raw(host_view(tensor))) for tensor in tensors]

    def overwritten(self) -> Tensor | None:
        """A tensor that the program has written to, or freed, since `begin`."""
        tensors = (*self.outputs, *self.inputs)
        for tensor, seen in zip(tensors, self._seen, strict=False):
            freed = tensor.untyped_storage().nbytes() < len(seen)
            if freed or raw(host_view(tensor)) != seen:
                return tensor
        return None

    def deliver(self) -> None:
        """Fill the program's outputs: they belong to the program again."""
        if self._in_flight:
            for tensor, result in zip(self.outputs, self.working, strict=False):
                tensor.copy_(result)
        self._in_flight, self._seen = False, []


def overlapping(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether one of `some` shares memory with one of `others`."""
    ranges = [memory_of(tensor) for tensor in others]
    return any(
        first < end and begin < last
        for first, last in map(memory_of, some)
        for begin, end in ranges
    )


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a dense tensor, the end excluded."""
    start = host_view(tensor).data_ptr()
    return start, start + tensor.nbytes
