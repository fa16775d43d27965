"""ZeRO 2: a bucket's gradients are reduced during backward, and freed.

    backward    ... layer 4 | layer 3 | layer 2 | layer 1 | end
    bucket 0          full -> reduce-scatter -> own shard, the rest is freed
    bucket 1                         full -> reduce-scatter -> ...
    step        nothing left to reduce

Each backward sends (N-1)/N of the gradients, and whole gradients are a few buckets at a
time. Inside `no_sync` they stay whole, all of them: that is the memory of stage 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from xtrain.comm.backward import weakly
from xtrain.zero.buckets import ShardedBucket
from xtrain.zero.stage1 import ReduceAtStep


class ReduceInBackward(ReduceAtStep):
    """Stage 1's reduction of a bucket, as soon as backward has completed it."""

    _is_local = False  # no_sync has left whole gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside send nothing; gradients add up whole, as in stage 1.

        The first backward outside reduces the sums; `reduce_gradients` does it too.
        """
        with super().no_sync():
            self._is_local = True
            yield

    def take_over(self, buckets: list[ShardedBucket]) -> None:
        super().take_over(buckets)
        for bucket in buckets:
            for parameter in bucket.parameters:
                ready = weakly(self._gradient_ready)
                parameter.register_post_accumulate_grad_hook(ready)

    @torch.no_grad()
    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        if not self.sync:
            self._is_local = True
            return
        self._reducer.enter_backward()
        self._bucket_of[parameter].take(parameter)  # with what no_sync has added up
        self._reducer.issue_complete()

    def _end_of_backward(self) -> None:
        self._reducer.finish()
        self._is_local = False

    def reduce_gradients(self) -> None:
        """Reduce what no_sync has left; backward did the rest."""
        if self._is_local:
            self._end_of_backward()
        elif kept := self._whole_gradients():
            raise RuntimeError(
                f"{kept} parameters have a whole gradient again: stage 2 reduced and "
                "freed it in backward. Is another data parallelism around the module?"
            )

    def forget(self) -> None:
        super().forget()
        self._is_local = not self.sync
