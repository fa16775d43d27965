"""The drawing of rounds shows the order in which the runner times contestants."""

import random
import re

import pytest

from xtrain.bench.race_sets import load
from xtrain_docs.figures.rounds import race_rounds

TEXT = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>')


def drawn_rounds(drawing: str, rounds: int) -> list[list[str]]:
    """The names in the boxes, row by row and from left to right."""
    found = [(float(y), float(x), words) for x, y, words in TEXT.findall(drawing)]
    heads = [y for y, _, words in found if re.fullmatch(r"round \d+", words)]
    assert len(heads) == rounds
    return [
        [words for at, x, words in sorted(found) if abs(at - y) < 3 and x > 66]
        for y in heads
    ]


@pytest.mark.parametrize(
    ("name", "race"), [("backends", "all_reduce"), ("lc1", "all_reduce_single")]
)
def test_rounds_are_drawn_in_the_order_of_the_seed(name, race):
    (found,) = [one for one in load(name).RACES if one.name == race]
    order = [contestant.name for contestant in found.contestants]
    expected, shuffle = [], random.Random(0).shuffle
    for _ in range(5):
        shuffle(order)
        expected.append(list(order))
    assert drawn_rounds(race_rounds(name, race, 5), 5) == expected
    assert len({tuple(one) for one in expected}) > 1


def test_each_sample_stands_between_two_barriers():
    assert race_rounds(rounds=2).count("xt-stroke") == 2 * 3 * 2


def test_an_unknown_race_stops_the_build():
    with pytest.raises(ValueError, match="no race heat"):
        race_rounds(race="heat")
