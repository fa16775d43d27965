"""How the ranks make a tensor in shared memory: reserve, tell, map, and agree on it."""

import os

import torch
from torch import Tensor

from xtrain.backends.call_runner import CallRunner
from xtrain.backends.calls import in_words
from xtrain.backends.shared_tensors import reserve


def make_shared(runner: CallRunner, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Make this rank's tensor and map those of the others; see `shared_empty`."""
    shared = getattr(runner.transport, "shared", None)
    if shared is None:
        raise ValueError(
            f'shared_empty: needs a group on "xtrain-shm", not on {runner.backend}'
        )
    descriptor = -1
    error: Exception | None = None
    try:
        descriptor = reserve(shape, dtype)
    except OSError as problem:
        error = problem
    try:
        descriptors = runner.exchange("shared_empty", (shape, dtype), descriptor)
        if -1 not in descriptors:
            try:
                tensor = shared.map(descriptors, shape, dtype)
            except (OSError, RuntimeError, ValueError) as problem:
                error = problem
        fine = runner.exchange("shared_empty", None, error is None)
    finally:
        if descriptor != -1:
            os.close(descriptor)  # everyone has mapped it
    if 0 in fine:
        failed = runner.global_rank(fine.index(0))
        raise RuntimeError(
            f"shared_empty: rank {failed} has no memory for {in_words((shape, dtype))}"
        ) from error
    return tensor
