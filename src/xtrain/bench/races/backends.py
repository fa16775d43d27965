"""Our two backends against gloo, through torch's own functions.

Every contestant makes the same call, such as `dist.all_reduce(tensor, group=group)`;
only the group's backend differs. All groups stand side by side in the same processes,
so the sides take turns from sample to sample.

The last races take the tricks of shared memory one by one: the baseline does without,
everything else is equal.

`size` is the whole tensor in bytes, as in the races of lecture 1; for the training step
it is the gradients of all layers together.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from xtrain import backends
from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.shared_memory import SharedMemory
from xtrain.bench.race import Case, Contestant, Goal, Race, Trial
from xtrain.bench.races.lc1 import (
    ITEM,
    KiB,
    MiB,
    all_gather_reference,
    all_reduce_reference,
    pattern,
    reduce_scatter_reference,
    total,
    trial,
)
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.comm.reduce_op import divide_if_average, fold_into

TITLE = "Our backends against gloo, under the same torch functions"
LAYERS, BATCH = 4, 4  # of the training step: much to send, little to compute
SIZES = (4 * KiB, 256 * KiB, 16 * MiB, 64 * MiB)
BACKENDS = ("gloo", "xtrain-shm", "xtrain-socket")
SHM, SOCKET = BACKENDS[1:]


def group_on(backend: str) -> ProcessGroup | None:
    """A group of all ranks on `backend`; the default group stands in for gloo."""
    if backend == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend=backend)


def on(kind: str, function: Callable[..., object], backend: str, case: Case) -> Trial:
    """A trial of lecture 1 whose function runs in a group on `backend`."""
    return trial(kind, partial(function, group=group_on(backend)), case)


def sides(make: Callable[..., Trial], *given: Any) -> tuple[Contestant, ...]:
    """The same trial on gloo, on shared memory and on sockets."""
    return tuple(Contestant(name, partial(make, *given, name)) for name in BACKENDS)


# ------------------------------------------------------ tensors in shared memory


def shared_trial(case: Case) -> Trial:
    """An all-reduce of a tensor that lives in shared memory."""
    group = group_on(SHM)
    tensor = backends.shared_empty(case.size // ITEM, dtype=torch.float32, group=group)
    tensor.copy_(pattern(case, dist.get_rank() + 1))
    return Trial(partial(dist.all_reduce, tensor, group=group), [tensor], tensor.zero_)


def copy_trial(case: Case) -> Trial:
    """Every rank reads a tensor once and writes one: no all-reduce can do with less."""
    source = total(case)
    copy = torch.zeros_like(source)
    return Trial(partial(copy.copy_, source), [copy])


# ------------------------------------------------- broadcast and all-to-all


def broadcast_reference(case: Case) -> list[Tensor]:
    """What rank 0 has."""
    return [pattern(case, 1)]


def all_to_all_reference(case: Case) -> list[Tensor]:
    """This rank's piece of every rank's tensor."""
    rank = dist.get_rank()
    givers = range(case.ranks)
    wholes = [pattern(case, giver + 1).tensor_split(case.ranks) for giver in givers]
    return [torch.cat([pieces[rank] for pieces in wholes])]


# -------------------------------------------------------------- point-to-point


def ping_pong_trial(backend: str, case: Case) -> Trial:
    """Ranks 0 and 1, 2 and 3, ...: a message there and one back."""
    rank, group = dist.get_rank(), group_on(backend)
    mine = pattern(case, rank + 1)
    received = torch.empty_like(mine)
    send = partial(dist.send, mine, rank ^ 1, group=group)
    receive = partial(dist.recv, received, rank ^ 1, group=group)

    def there_and_back() -> None:
        for step in (send, receive) if rank % 2 == 0 else (receive, send):
            step()

    return Trial(there_and_back, [received])


def ping_pong_reference(case: Case) -> list[Tensor]:
    """What the partner sent."""
    return [pattern(case, (dist.get_rank() ^ 1) + 1)]


# --------------------------------------------------------------- training step


class Layers(nn.Module):
    """Square linear layers whose weights take `nbytes` together."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.width = int((nbytes / LAYERS / ITEM) ** 0.5)
        self.layers = nn.ModuleList(
            nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def ddp_trial(backend: str, case: Case) -> Trial:
    """One step of torch's DDP with plain SGD; the weights must come out equal."""
    torch.manual_seed(0)
    model = Layers(case.size).to(case.device)
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(2, BATCH, model.width, device=case.device).unbind()
    group = group_on(backend)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()

    return Trial(step, [weight.detach() for weight in model.parameters()])


# ---------------------------------------------------------------------- tricks


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
    """No walk to the line that called, and no fingerprint."""

    compares_calls = False


class TwoSteps(SharedMemory):
    ONE_SHOT_BYTES = 0


class OneStep(SharedMemory):
    ONE_SHOT_BYTES = 1 * MiB


def nap() -> None:
    """The shortest sleep there is."""
    time.sleep(1e-6)


class Sleeping(XtrainProcessGroup):
    """Sleeps instead of giving the turn away."""

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


# ----------------------------------------------------------------------- races


def goals(
    least: dict[str, Sequence[float]], sizes: Sequence[int] = SIZES
) -> tuple[Goal, ...]:
    """With 4 ranks, a least ratio for each size."""
    return tuple(
        Goal(name, ratio, size, 4)
        for name, ratios in least.items()
        for size, ratio in zip(sizes, ratios, strict=True)
    )


def not_slower(sizes: Sequence[int]) -> tuple[Goal, ...]:
    """Never behind gloo."""
    return tuple(Goal(n, 1.0, size, 4) for n in (SHM, SOCKET) for size in sizes)


SHARED = Contestant("shared tensor", shared_trial)

RACES = [
    Race(
        "all_reduce",
        "All-reduce",
        sides(on, "all_reduce", dist.all_reduce),
        sizes=SIZES,
        reference=all_reduce_reference,
        goals=goals({SHM: (70.0, 15.0, 3.0, 3.0), SOCKET: (15.0, 5.0, 1.8, 1.8)}),
    ),
    Race(
        "all_reduce_single",
        "All-reduce of a small tensor, one call at a time",
        sides(on, "all_reduce", dist.all_reduce),
        sizes=SIZES[:1],
        reference=all_reduce_reference,
        goals=goals({SHM: (70.0,), SOCKET: (15.0,)}, SIZES[:1]),
        single=True,
    ),
    Race(
        "all_reduce_shared",
        "All-reduce of a tensor that lives in shared memory",
        (
            Contestant("gloo", partial(on, "all_reduce", dist.all_reduce, "gloo")),
            SHARED,
        ),
        sizes=SIZES[2:],
        reference=all_reduce_reference,
        goals=goals({SHARED.name: (5.0, 5.0)}, SIZES[2:]),
    ),
    Race(
        "copy_floor",
        "All-reduce against one copy of the tensor",
        (
            Contestant("one copy", copy_trial),
            Contestant(SHM, partial(on, "all_reduce", dist.all_reduce, SHM)),
            SHARED,
        ),
        sizes=SIZES[2:],
        reference=all_reduce_reference,
        goals=goals({SHM: (0.5, 0.5), SHARED.name: (0.5, 0.5)}, SIZES[2:]),
    ),
    Race(
        "reduce_scatter",
        "Reduce-scatter",
        sides(on, "reduce_scatter", REDUCE_SCATTER),
        sizes=SIZES[:3],
        reference=reduce_scatter_reference,
        goals=not_slower(SIZES[:3]),
    ),
    Race(
        "all_gather",
        "All-gather",
        sides(on, "all_gather", ALL_GATHER),
        sizes=SIZES[:3],
        reference=all_gather_reference,
        goals=not_slower(SIZES[:3]),
    ),
    Race(
        "all_to_all",
        "All-to-all",
        sides(on, "all_to_all", dist.all_to_all_single),
        sizes=SIZES[:3],
        reference=all_to_all_reference,
        goals=not_slower(SIZES[:3]),
    ),
    Race(
        "broadcast",
        "Broadcast",
        sides(on, "broadcast", dist.broadcast),
        sizes=SIZES[:3],
        reference=broadcast_reference,
        goals=not_slower(SIZES[:3]),
    ),
    Race(
        "ping_pong",
        "A message there and one back",
        sides(ping_pong_trial),
        sizes=SIZES[:3],
        ranks=(2,),
        reference=ping_pong_reference,
        goals=tuple(Goal(SHM, 5.0, size, 2) for size in SIZES[:3]),
    ),
    Race(
        "ddp_step",
        "A training step of torch's DDP",
        sides(ddp_trial),
        sizes=(1 * MiB, 64 * MiB),
        tolerance=1e-5,
        goals=tuple(Goal(SHM, 1.25, 64 * MiB, ranks) for ranks in (2, 4)),
    ),
    Race(
        "check",
        "The check for mismatches",
        (
            variant("with the check"),
            variant("without", group=Unchecked),
        ),
        sizes=SIZES[:1],
        reference=all_reduce_reference,
    ),
    Race(
        "trick_one_step",
        "One step or two",
        (
            variant("two steps", TwoSteps),
            variant("one step", OneStep),
        ),
        sizes=(4 * KiB, 64 * KiB, 256 * KiB, 1 * MiB),
        ranks=(4,),
        reference=all_reduce_reference,
    ),
    Race(
        "trick_yield",
        "Yield or sleep",
        (
            variant("sleep", group=Sleeping),
            variant("yield"),
        ),
        sizes=(4 * KiB, 256 * KiB, 16 * MiB),
        ranks=(4,),
        reference=all_reduce_reference,
    ),
    Race(
        "trick_stage",
        "How large a stage",
        (
            variant("128 KiB", Pieces128K),
            variant("512 KiB", Pieces512K),
            variant("1 MiB", Pieces1M),
            variant("2 MiB"),
        ),
        sizes=(16 * MiB, 64 * MiB),
        ranks=(4,),
        reference=all_reduce_reference,
    ),
    Race(
        "trick_two_shares",
        "The first two shares at once",
        (
            variant("copy one, add", CopyThenAdd),
            variant("add two"),
        ),
        sizes=(4 * KiB, 256 * KiB, 16 * MiB),
        ranks=(4,),
        reference=all_reduce_reference,
    ),
]
