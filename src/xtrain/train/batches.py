"""A data rank's share of each step's global batch, made ahead by threads.

    step s       samples  s G .. s G + G - 1
    rank 0       | first |
    rank 1               | next |
    rank 2                      | last |     G = 8: 3, 3, 2 samples

Shares follow each other in the order of ranks and differ by at most one sample, the
first ones are larger. Which samples a step has depends on nothing but its number: ranks
exchange no messages, the global batch is the same for any number of them, and a run
resumes from a step alone. A rank's batch takes 8 bytes a token for each of tokens,
labels and documents; up to two batches a worker are ready at once.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from xtrain.train.samples import Samples

AHEAD = 2  # batches for each worker


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's samples of a step, int64, [B, S] each.

    Attributes:
        labels: the next tokens, or -100.
        documents: the number of each token's document within its sequence, -1 for
            padding; None without document masks.
        first: the number of the first sample.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    first: int

    def to(self, device: torch.device) -> "Batch":
        documents = None if self.documents is None else self.documents.to(device)
        given = self.tokens.to(device), self.labels.to(device)
        return Batch(*given, documents, self.first)

    @property
    def token_mask(self) -> Tensor | None:
        """[B, S], bool, False for padding, which routers skip; None without masks."""
        return None if self.documents is None else self.documents >= 0


class Batches:
    """A rank's batches, step after step without end; `batches[step]` is any of them.

    Args:
        global_batch: samples of a step on all ranks together.
        rank, size: among data ranks, those that bring batches of their own.
        start: the first step that `next` returns.
        workers: threads that make batches ahead; with 0 `next` makes its own.
        micro_batches: into how many each share is going to be cut.

    Attributes:
        step: the step that `next` returns now; the whole state.
        seconds_waited: how long `next` took, all calls together.

    Raises:
        ValueError: a number does not fit; the same on every rank but for `rank`.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch: int,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
        workers: int = 0,
        micro_batches: int = 1,
    ):
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks")
        if micro_batches < 1 or global_batch < size * micro_batches:
            raise ValueError(
                f"a global batch of {global_batch} samples has not one for each of "
                f"{micro_batches} micro-batches on each of {size} ranks"
            )
        if start < 0 or workers < 0:
            raise ValueError(f"start {start} or workers {workers} is less than 0")
        self.samples, self.global_batch, self.workers = samples, global_batch, workers
        self.begin, self.end = share(global_batch, rank, size)
        self.step, self.seconds_waited = start, 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._ready: deque[Future[Batch]] = deque()
        self._closed = False

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise ValueError(f"step {step} is less than 0")
        first = step * self.global_batch
        numbers = range(first + self.begin, first + self.end)
        samples = [self.samples[number] for number in numbers]
        tokens = torch.stack([sample.tokens for sample in samples])
        labels = torch.stack([sample.labels for sample in samples])
        given = [s.documents for s in samples if s.documents is not None]
        return Batch(tokens, labels, torch.stack(given) if given else None, numbers[0])

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        """The batch of `step`. What a worker raised is raised here, for its step."""
        if self._closed:
            raise ValueError("these batches are closed")
        began = time.perf_counter()
        try:
            batch = self._made_ahead() if self.workers else self[self.step]
        finally:
            self.seconds_waited += time.perf_counter() - began
        self.step += 1
        return batch

    def _made_ahead(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "xtrain-batches")
        while len(self._ready) < AHEAD * self.workers:
            step = self.step + len(self._ready)
            self._ready.append(self._pool.submit(self.__getitem__, step))
        batch = self._ready[0].result()
        self._ready.popleft()
        return batch

    def close(self) -> None:
        """End the threads; a batch that one is making is waited for."""
        self._closed = True
        self._ready.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Where a part of `count` things begins and ends; the first ones are larger."""
    base, larger = divmod(count, parts)
    start = part * base + min(part, larger)
    return start, start + base + (part < larger)
