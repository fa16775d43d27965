"""What a record lets one expect of its tests."""

from xtrain.evidence.forecast import FIRST, OTHER, UNKNOWN_SECONDS, expected, seconds
from xtrain.evidence.results import value_of
from xtrain.evidence.store import Entry


def entry(seconds, ran):
    return Entry("k", "2.13", (), value_of("passed", seconds, ran))


RECORD = {
    "t::dear[2]": entry(3.0, {"a:b": [("gloo", 2)]}),
    "t::cheap[2]": entry(0.3, {"a:b": [("gloo", 2)], "a:c": None}),
    "t::four": entry(9.0, {"a:b": [("gloo", 2), ("gloo", 4)]}),
    "t::alone": entry(0.1, {"a:d": []}),
}


def test_the_cheapest_test_of_a_symbol_and_a_world_size_comes_first():
    known = expected(RECORD)
    orders = {name: (test.order, test.ranks) for name, test in known.items()}
    assert orders == {
        "t::cheap[2]": (FIRST, 2),
        "t::dear[2]": (OTHER, 2),
        "t::four": (FIRST, 4),  # the only one with four ranks
        "t::alone": (OTHER, 0),
    }


def test_seconds_are_those_of_the_record_and_of_ranks_that_take_turns():
    known = expected(RECORD)
    assert seconds(RECORD, known, lambda ranks: 1.0) == 12.4
    turns = {0: 1.0, 2: 2.0, 4: 0.0}  # four ranks do not fit
    assert seconds(RECORD, known, turns.__getitem__) == 2 * 3.3 + 0.1
    assert seconds(["t::new"], known, lambda ranks: 1.0) == UNKNOWN_SECONDS
