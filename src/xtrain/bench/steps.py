"""The three training steps that lectures race, and a race of one of them.

With much to compute, with much to send, and so small that neither takes long. `size` is
that of all weights in bytes, and so of all gradients.
"""

from collections.abc import Mapping

from xtrain.bench.race import Contestant, Goal, Race
from xtrain.bench.training import CHECKED, TOLERANCE, Shape

MiB = 2**20
COMPUTE, SEND, SMALL = Shape(4, 4, 256), Shape(8, 1, 64), Shape(4, 1, 64)
SIZES = {COMPUTE: 16 * MiB, SEND: 96 * MiB, SMALL: 2 * MiB}


def race(
    name: str,
    title: str,
    shape: Shape,
    sides: tuple[Contestant, ...],
    goals: Mapping[str, float | None],
) -> Race:
    """A race of steps of one shape."""
    size = SIZES[shape]
    return Race(
        name,
        title,
        sides,
        sizes=(size,),
        tolerance=TOLERANCE,
        checked_calls=CHECKED,
        memory=shape is SEND,
        goals=tuple(
            Goal(who, ratio, size, ranks)
            for who, ratio in goals.items()
            if ratio is not None
            for ranks in (2, 4)
        ),
    )
