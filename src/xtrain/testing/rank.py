"""The life of one rank: join the group, then run what the parent sends.

    parent --- ("run", PackedCall(function, arguments)) -> rank
    parent <-- Outcome(value | exception, traceback) -------- rank
    parent --- ("reset", None), every rank having answered -> rank

The reset waits for the parent's word because a rank that tidies up while its
neighbours still communicate could break them.
"""

import os
import pickle
import sys
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from xtrain.evidence import executed
from xtrain.testing import pretended_device, transport
from xtrain.testing.backend_choice import registration
from xtrain.testing.outcome import Outcome, failure
from xtrain.testing.state import Clean


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank must know to join: its rank, its group and the group's store."""

    rank: int
    size: int
    backend: str
    device: str
    store: str
    environment: dict[str, str] = field(default_factory=dict)


def rank_main(spec: RankSpec, jobs: Connection) -> None:
    """Body of a rank's process."""
    try:
        join(spec)
        clean = Clean(spec.rank, spec.device)
    except BaseException as error:
        jobs.send(failure(error))
        return
    jobs.send(Outcome("ready", reusable=True))
    while True:
        order, call = jobs.recv()
        if order == "run":
            jobs.send(answer(call, clean))
        else:
            clean.restore()


def join(spec: RankSpec) -> None:
    """Create the default process group of this rank."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.size),
        LOCAL_RANK=str(spec.rank),
        LOCAL_WORLD_SIZE=str(spec.size),
    )
    os.environ.update(spec.environment)
    if spec.device != "cpu":
        if spec.device == pretended_device.NAME:
            pretended_device.register()
        module = torch.get_device_module(spec.device)
        device = torch.device(spec.device, spec.rank % module.device_count())
        module.set_device(device)
        torch.set_default_device(device)  # torch.ones(4) lands on the rank's GPU
    registration(spec.backend)()
    dist.init_process_group(
        spec.backend,
        store=dist.FileStore(spec.store, spec.size),
        rank=spec.rank,
        world_size=spec.size,
    )


def answer(call: transport.PackedCall, clean: Clean) -> Outcome:
    """Make one call; its outcome, with the watched symbols that ran."""
    with executed.watching_code(call.watched) as seen:
        outcome = make(call, clean)
    return replace(outcome, executed=tuple(seen.places))


def make(call: transport.PackedCall, clean: Clean) -> Outcome:
    """Make one call; its outcome."""
    try:
        transport.ensure_module(call.module, call.file)
        fn, args = pickle.loads(call.pickled)
        value = transport.dumps(fn(*args))
        return Outcome("returned", value=value, reusable=clean.reusable())
    except BaseException as error:
        return failure(error, reusable=clean.untouched())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
