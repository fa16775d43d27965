"""Which micro-batches all-reduce, without and with no_sync."""

from contextlib import nullcontext

import torch
from torch import nn

from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel

from ... import runs
from ...amounts import count
from ...figures import REGISTRY
from .boxes import Box, lanes


def calls(micro_batches: int, no_sync: bool) -> list[list[int]]:
    """The bytes of each all-reduce, by the micro-batch whose backward it is in."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    seen = []
    for number in range(micro_batches):
        waits = no_sync and number < micro_batches - 1
        with CommLedger() as ledger, model.no_sync() if waits else nullcontext():
            model(torch.ones(2, 64)).sum().backward()
        seen.append([event.payload for event in ledger.events])
    return seen


@REGISTRY
def calls_by_micro_batch(micro_batches: int = 4) -> str:
    """Micro-batches, and below each what it sends."""
    rows: list[tuple[str, list[Box | None]]] = []
    for name, quiet in (("always", False), ("no_sync", True)):
        found = runs.remembered(calls, 2, micro_batches, quiet)[0]
        rows.append((name, [Box(f"micro-\nbatch {n}", n) for n in range(len(found))]))
        sends = [
            Box(f"{len(sent)} calls\n{count(sum(sent))}", 7,
                f"{len(sent)} all-reduces, {count(sum(sent))} bytes")
            if sent else None
            for sent in found
        ]  # fmt: skip
        rows.append(("sends", sends))
    return lanes(rows, "All-reduces of a step, by micro-batch")
