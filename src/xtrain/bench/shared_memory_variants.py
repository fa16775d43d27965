"""The all-reduce over shared memory with one thing changed, to measure its effect.

Each variant is a backend of its own, whose transport or process group differs from ours
in that one thing.
"""

import time
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from xtrain import backends
from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.shared_memory import SharedMemory
from xtrain.bench.backend_trials import on
from xtrain.bench.collective_trials import KiB, MiB
from xtrain.bench.race import Case, Contestant, Trial
from xtrain.comm.reduce_op import divide_if_average, fold_into


def variant_trial(
    transport: type[SharedMemory], group: type[XtrainProcessGroup], case: Case
) -> Trial:
    """An all-reduce over shared memory, on a backend of its own."""
    name = f"xtrain-{transport.__name__}-{group.__name__}".lower()
    backends.register_variant(name, transport, group)
    return on("all_reduce", dist.all_reduce, name, case)


def variant(
    name: str,
    transport: type[SharedMemory] = SharedMemory,
    group: type[XtrainProcessGroup] = XtrainProcessGroup,
) -> Contestant:
    """The all-reduce over shared memory with something changed."""
    return Contestant(name, partial(variant_trial, transport, group))


class Unchecked(XtrainProcessGroup):
    """Without the fingerprint of a call and its source line."""

    compares_calls = False


class TwoSteps(SharedMemory):
    ONE_SHOT_BYTES = 0


class OneStep(SharedMemory):
    ONE_SHOT_BYTES = 1 * MiB


def nap() -> None:
    """The shortest sleep there is."""
    time.sleep(1e-6)


class Sleeping(XtrainProcessGroup):
    """Sleeps instead of yielding."""

    give_way = staticmethod(nap)


class Pieces128K(SharedMemory):
    PIECE_BYTES = 128 * KiB


class Pieces512K(SharedMemory):
    PIECE_BYTES = 512 * KiB


class Pieces1M(SharedMemory):
    PIECE_BYTES = 1 * MiB


def copy_then_add(output: Tensor, shares: list[Tensor], op: Any) -> None:
    """In place of reading two shares at first."""
    output.copy_(shares[0])
    for share in shares[1:]:
        fold_into(output, share, op)
    divide_if_average(output, op, len(shares))


class CopyThenAdd(SharedMemory):
    reduce_into = staticmethod(copy_then_add)
