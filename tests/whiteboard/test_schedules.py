"""The whiteboard forms of schedules are those of the library, action by action."""

import importlib

import pytest

from xtrain import schedules

GENERATORS = [
    "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v", "chimera",
    "dualpipe", "dualpipe_v",
]  # fmt: skip
LEAST = {"zb_v": lambda ranks: 2 * ranks - 1}
"""Micro-batches that a form needs and the library's does not."""


def form(name):
    return getattr(importlib.import_module(f"xtrain.whiteboard.schedules.{name}"), name)


def legal(name, *sizes):
    try:
        return schedules.SCHEDULES[name](*sizes)
    except ValueError:
        return None


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.verifies(*[f"xtrain.whiteboard.schedules.{n}:{n}" for n in GENERATORS])
def test_a_form_gives_the_library_forms_orders(name):
    compared = 0
    for ranks in range(1, 9):
        for m in range(1, 25):
            if m < LEAST.get(name, lambda ranks: 1)(ranks):
                continue
            for chunks in (1, 2, 3) if name == "interleaved" else (None,):
                sizes = (ranks, m) if chunks is None else (ranks, m, chunks)
                if schedule := legal(name, *sizes):
                    expected = [list(map(str, a)) for a in schedule.actions]
                    assert form(name)(*sizes) == expected, sizes
                    compared += 1
    assert compared >= 30


@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
@pytest.mark.verifies("xtrain.whiteboard.schedules.simulate:simulate")
def test_the_simulator_on_one_page_gives_the_librarys_times(name):
    for ranks, m in [(1, 1), (2, 4), (3, 6), (4, 8), (4, 10)]:
        schedule = legal(name, ranks, m)
        if schedule is None:
            continue
        timeline = schedules.simulate(schedule, 1.0, 2.0, 0.5, p2p=0.25)
        orders = [list(map(str, actions)) for actions in schedule.actions]
        placed = form("simulate")(orders, 1.0, 2.0, 0.5, p2p=0.25)
        for rank in range(schedule.ranks):
            assert [start for _, start, _ in placed[rank]] == list(
                timeline.starts[rank]
            )
            assert [end for *_, end in placed[rank]] == list(timeline.ends[rank])


def test_the_simulator_on_one_page_refuses_what_waits_for_itself():
    with pytest.raises(ValueError, match="deadlocks"):
        form("simulate")([["0BW0", "0F0"], ["1F0", "1BW0"]])
