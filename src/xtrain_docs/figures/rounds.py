"""The rounds of a race as a drawing: in which order the contestants are timed."""

from itertools import islice

from ..svg import cell, document, fit, line, text
from . import REGISTRY

WIDTH, LEFT, HIGH, BOX = 420, 66, 38, 28


@REGISTRY
def race_rounds(
    name: str = "backends", race: str = "all_reduce", rounds: int = 4
) -> str:
    """The first rounds of a race, in the order that the runner draws.

    Args:
        name: of a set of races, such as lc1.
    """
    from xtrain.bench.race_sets import choose, load
    from xtrain.bench.runner import orders
    from xtrain.bench.settings import Settings

    (found,) = choose(load(name).RACES, [race])
    names = [contestant.name for contestant in found.contestants]
    drawn = list(islice(orders(names, Settings().seed), rounds))
    wide = (WIDTH - LEFT - 4) / len(names)
    parts = []
    for number, order in enumerate(drawn):
        y = 6.0 + HIGH * number
        parts.append(text(6, y + 18.5, f"round {number + 1}", "xt-label"))
        for place, contestant in enumerate(order):
            left = LEFT + wide * place
            parts += sample(contestant, names.index(contestant), left, y, wide)
    low = HIGH * len(drawn) + 20
    told = "A box is one sample: calls between two barriers."
    parts.append(text(LEFT, low, told, "xt-tick"))
    words = "; ".join(
        f"round {number}: {', '.join(order)}" for number, order in enumerate(drawn, 1)
    )
    return fit(document(WIDTH, low + 10, parts, "Rounds of a race", words), WIDTH)


def sample(
    contestant: str, colour: int, left: float, y: float, wide: float
) -> list[str]:
    """The calls of one contestant, with a barrier on both sides."""
    ends = (left + 3, left + wide - 3)
    box = cell(left + 7, y, wide - 14, BOX, colour, contestant)
    return [*box, *(line(x, y - 3, x, y + BOX + 3, "xt-stroke") for x in ends)]
