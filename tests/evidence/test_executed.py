"""What a test has run: found in its own process, on ranks, in snippets and threads."""

import contextlib
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from xtrain.evidence import executed
from xtrain.testing import World, run_script

RING = "xtrain.comm.ring:ring_all_reduce"
SCATTER = "xtrain.comm.ring:ring_reduce_scatter"
LEDGER = "xtrain.comm.ledger:CommLedger"
TREE = "xtrain.comm.tree:tree_all_reduce"
FORMULA = "xtrain.plan.cost:crossover"
CONSTANT = "xtrain.testing.plugin:WORLD_SIZES"


def ring_on_a_rank(fails=False):
    from xtrain.comm import ring_all_reduce

    tensor = torch.ones(8)
    ring_all_reduce(tensor)
    if fails:
        raise ValueError(f"rank {dist.get_rank()} had enough")


def test_what_ranks_run_is_seen_with_its_place(world):
    with executed.watching([RING, TREE]) as seen:
        world(2).run(ring_on_a_rank)
        world(3).run(ring_on_a_rank)
    backend = world(2).backend
    assert seen.places == {RING: {(backend, 2), (backend, 3)}}


def test_ranks_are_asked_only_for_what_none_of_them_has_run(world):
    backend = world(2).backend
    with executed.watching([RING, TREE]) as seen:
        assert seen.missing(backend, 2).keys() == {RING, TREE}
        world(2).run(ring_on_a_rank)
        assert seen.missing(backend, 2).keys() == {TREE}
        assert seen.missing(backend, 3).keys() == {RING, TREE}
        world(2).run(ring_on_a_rank)
    assert seen.places == {RING: {(backend, 2)}}


def watchers() -> tuple[object, ...]:
    """What the interpreter reports calls to, on this rank and on its new threads."""
    if sys.version_info >= (3, 12):
        return tuple(sys.monitoring.get_tool(tool) for tool in (3, 4))
    return sys.getprofile(), threading.getprofile()


def test_ranks_forked_in_a_watched_test_are_not_watched_after_it():
    with World(2) as ranks:
        with executed.watching([RING, FORMULA]) as seen:
            ranks.run(ring_on_a_rank)
        assert RING in seen.places
        assert ranks.run(watchers) == [(None, None)] * 2


def test_ranks_that_fail_have_run_it_as_well(world):
    with executed.watching([RING]) as seen, pytest.raises(ValueError, match="enough"):
        world(2).run(ring_on_a_rank, True)
    assert seen.places == {RING: {(world(2).backend, 2)}}


def test_what_only_this_process_runs_has_no_place():
    from xtrain.comm.ledger import CommLedger

    with executed.watching([LEDGER, RING]) as seen, CommLedger():
        pass
    assert seen.places == {LEDGER: set()}


def test_a_thread_is_watched_too():
    from xtrain.comm.ledger import CommLedger

    with executed.watching([LEDGER]) as seen:
        thread = threading.Thread(target=CommLedger)
        thread.start()
        thread.join()
    assert seen.places == {LEDGER: set()}


def test_an_import_runs_nothing_and_a_constant_needs_no_run():
    with executed.watching([SCATTER, CONSTANT]) as seen:
        import xtrain.comm.ring  # noqa: F401
    assert seen.places == {CONSTANT: set()}


def test_snippets_are_watched():
    with executed.watching([RING, TREE]) as seen:
        run_script("snippets/lc1/ring_all_reduce.py")
    assert seen.places == {RING: {("gloo", 4)}}


def test_watches_nest_and_end(world):
    with executed.watching([RING]) as outer:
        with executed.watching([TREE]) as inner:
            world(2).run(ring_on_a_rank)
        world(1).run(ring_on_a_rank)
    world(3).run(ring_on_a_rank)
    assert inner.places == {}
    assert {size for _, size in outer.places[RING]} == {1}
    assert executed.current() is not inner


def test_a_watch_ends_with_an_error():
    before = executed.current()
    with contextlib.suppress(KeyError), executed.watching([FORMULA]):
        raise KeyError
    assert executed.current() is before


def test_a_thread_that_outlives_the_watch_is_let_go():
    if sys.version_info >= (3, 12):
        pytest.skip("there the interpreter reports no thread by itself")
    over, found = threading.Event(), []

    def outlive():
        over.wait()
        found.append(sys.getprofile())

    with executed.watching([RING]):
        thread = threading.Thread(target=outlive)
        thread.start()
    over.set()
    thread.join()
    assert found == [None]
