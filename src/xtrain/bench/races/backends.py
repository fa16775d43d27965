"""Our two backends against gloo, through torch's own functions.

The contestants differ in the backend of their group alone (`backend_trials`). The last
races take the tricks of shared memory one by one: the baseline does without, everything
else is equal (`shared_memory_variants`).

`size` is the whole tensor in bytes, as in the races of lecture 1; for the training step
it is the gradients of all layers together.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from xtrain.bench.backend_trials import (
    SHM,
    SOCKET,
    copy_trial,
    ddp_trial,
    on,
    ping_pong_reference,
    ping_pong_trial,
    shared_trial,
    sides,
)
from xtrain.bench.collective_trials import (
    KiB,
    MiB,
    all_gather_reference,
    all_reduce_reference,
    all_to_all_reference,
    broadcast_reference,
    reduce_scatter_reference,
)
from xtrain.bench.race import Case, Contestant, Goal, Race
from xtrain.bench.shared_memory_variants import (
    CopyThenAdd,
    OneStep,
    Pieces1M,
    Pieces128K,
    Pieces512K,
    Sleeping,
    TwoSteps,
    Unchecked,
    variant,
)
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER

TITLE = "Our backends against gloo, under the same torch functions"
SIZES = (4 * KiB, 256 * KiB, 16 * MiB, 64 * MiB)


def goals(
    least: dict[str, Sequence[float]], sizes: Sequence[int] = SIZES
) -> tuple[Goal, ...]:
    """With 4 ranks, a least ratio for each size."""
    return tuple(
        Goal(name, ratio, size, 4)
        for name, ratios in least.items()
        for size, ratio in zip(sizes, ratios, strict=True)
    )


def part(
    kind: str,
    function: Callable[..., object],
    reference: Callable[[Case], list[Tensor]],
) -> Race:
    """Another collective: never slower than gloo."""
    sizes = SIZES[:3]
    return Race(
        kind,
        kind.replace("_", "-").capitalize(),
        sides(on, kind, function),
        sizes=sizes,
        reference=reference,
        goals=goals(dict.fromkeys((SHM, SOCKET), (1.0,) * 3), sizes),
    )


def trick(
    name: str, title: str, variants: tuple[Contestant, ...], sizes: tuple[int, ...]
) -> Race:
    """All-reduces over shared memory that differ in one thing."""
    return Race(
        name, title, variants, sizes=sizes, ranks=(4,), reference=all_reduce_reference
    )


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
    part("reduce_scatter", REDUCE_SCATTER, reduce_scatter_reference),
    part("all_gather", ALL_GATHER, all_gather_reference),
    part("all_to_all", dist.all_to_all_single, all_to_all_reference),
    part("broadcast", dist.broadcast, broadcast_reference),
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
        (variant("with the check"), variant("without", group=Unchecked)),
        sizes=SIZES[:1],
        reference=all_reduce_reference,
    ),
    trick(
        "trick_one_step",
        "One step or two",
        (variant("two steps", TwoSteps), variant("one step", OneStep)),
        (4 * KiB, 64 * KiB, 256 * KiB, 1 * MiB),
    ),
    trick(
        "trick_yield",
        "Yield or sleep",
        (variant("sleep", group=Sleeping), variant("yield")),
        (4 * KiB, 256 * KiB, 16 * MiB),
    ),
    trick(
        "trick_stage",
        "How large a stage",
        (
            variant("128 KiB", Pieces128K),
            variant("512 KiB", Pieces512K),
            variant("1 MiB", Pieces1M),
            variant("2 MiB"),
        ),
        (16 * MiB, 64 * MiB),
    ),
    trick(
        "trick_two_shares",
        "The first two shares at once",
        (variant("copy one, add", CopyThenAdd), variant("add two")),
        (4 * KiB, 256 * KiB, 16 * MiB),
    ),
]
