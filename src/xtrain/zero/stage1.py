"""ZeRO 1: gradients are whole until the step, which begins by reducing them, once.

    backward     every rank adds up its own gradients, as without any other rank
    step         | bucket 2   | bucket 1   | bucket 0   |   from the last parameters on
                   take         take         take           a flat copy, `grad` freed
                   reduce-scatter -> own shard of the sum -> `grad` of the master

Each rank sends (N-1)/N of the gradients. At most two flat copies live at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.backward import Reducer
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.comm.main_grad import add_to_gradient, gradient_dtype
from xtrain.comm.work import Work
from xtrain.zero.buckets import ShardedBucket


class ReduceAtStep:
    """Gradients of the buckets' parameters become shards in `bucket.master.grad`."""

    def __init__(
        self, group: ProcessGroup | None, collectives: Collectives, average: bool
    ):
        self.group, self._collectives = group, collectives
        self._divisor = rank_and_size(group)[1] if average else 1
        self.sync = True  # False inside no_sync
        self._is_reduced = False  # since the last step
        self._bucket_of: dict[nn.Parameter, ShardedBucket] = {}
        self._reducer = Reducer(
            self._reduce_scatter, self._end_of_backward, in_flight=1
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay whole and local: here they do so anyway."""
        before, self.sync = self.sync, False
        self._is_reduced = False  # there may be more to reduce, here or elsewhere
        try:
            yield
        finally:
            self.sync = before

    def take_over(self, buckets: list[ShardedBucket]) -> None:
        """From here on the gradients of these buckets are reduced here."""
        # Backward reaches the last parameters first, so buckets leave from the end.
        self._reducer.buckets = [*buckets[::-1], *self._reducer.buckets]
        self._bucket_of.update({p: b for b in buckets for p in b.parameters})

    def reduce_gradients(self) -> None:
        """Every rank reduces every bucket, whichever parameters took part there."""
        if not self._is_reduced or self._whole_gradients():
            self._is_reduced = True
            self._reducer.finish()

    def begin_step(self) -> None:
        """What is reduced from now on belongs to another step."""
        self._is_reduced = False

    def forget(self) -> None:
        """Forget all gradients, whole ones and shards."""
        self.begin_step()
        for bucket in self._reducer.buckets:
            bucket.full_grad = bucket.master.grad = None
            for parameter in bucket.parameters:
                parameter.grad = None

    def _whole_gradients(self) -> int:
        return sum(parameter.grad is not None for parameter in self._bucket_of)

    def _end_of_backward(self) -> None:
        self._reducer.finish()

    @torch.no_grad()
    def _reduce_scatter(self, bucket: ShardedBucket) -> Work:
        """Begin to reduce a bucket; what has no gradient counts as zero."""
        for parameter in list(bucket.waiting):
            bucket.take(parameter)
        full_grad = bucket.full_grad
        assert full_grad is not None
        shard = torch.empty_like(bucket.shard, dtype=full_grad.dtype)
        work = self._collectives.reduce_scatter(shard, full_grad, group=self.group)
        return Work([work], partial(take_shard, bucket, shard, self._divisor))


@torch.no_grad()
def take_shard(bucket: ShardedBucket, shard: Tensor, divisor: int) -> None:
    """Free the full gradients, and add the reduced shard to the master's gradient."""
    master = bucket.master
    bucket.full_grad = None
    reduced = shard.to(dtype=gradient_dtype(master), device=master.device)
    if divisor > 1:
        reduced.div_(divisor)
    add_to_gradient(master, reduced)
