"""World: one result per rank, from ranks that stay alive."""

import os
import pickle
import sys

import pytest
import torch

from tests.testing import ranks
from xtrain.testing import World, transport
from xtrain.testing.world import Worlds


def test_results_come_in_rank_order_from_living_ranks(world, world_size):
    first = world(world_size).run(ranks.ranks_sum)
    second = world(world_size).run(ranks.ranks_sum)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first} | {os.getpid()}) == world_size + 1
    expected = world_size * (world_size - 1) / 2
    assert [total.tolist() for _, total in first] == [[expected]] * world_size


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_ranks_run_under_the_batch_policy(world):
    assert world(2).run(os.sched_getscheduler, 0) == [os.SCHED_BATCH] * 2


def test_arguments_reach_every_rank(world):
    sums = world(3).run(ranks.add, torch.tensor([10]), 2)
    assert [total.item() for total in sums] == [10, 12, 14]


def test_a_returned_slice_does_not_carry_the_tensor_it_was_cut_from(world):
    (piece,) = world(1).run(ranks.slice_of_a_big_one)
    assert piece.untyped_storage().nbytes() == 10 * 4
    assert not piece.requires_grad
    (kept,) = world(1).run(ranks.parameter)
    assert isinstance(kept, torch.nn.Parameter)
    assert kept.tolist() == [2, 3]
    assert not kept.requires_grad


def test_tensors_arrive_on_the_default_device_of_the_receiver():
    sent = transport.dumps([torch.ones(2)])
    with torch.device("meta"):
        assert pickle.loads(sent)[0].is_meta
    assert pickle.loads(sent)[0].tolist() == [1, 1]


def test_a_function_without_a_name_is_refused_before_anything_starts():
    lonely = World(2)

    def inner():
        pass

    for function in (lambda: None, inner):
        with pytest.raises(ValueError, match="top level of its module"):
            lonely.run(function)
    with pytest.raises(ValueError, match="must be picklable"):
        lonely.run(ranks.add, lambda: None, 1)


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="size=0"):
        World(0)
    with pytest.raises(ValueError, match="'thread'"):
        World(2, start_method="thread")


def test_functions_are_found_in_files_outside_the_path(world, tmp_path, monkeypatch):
    """Ranks that started earlier import a module they have never seen."""
    pool = world(2)
    pool.run(ranks.pid)
    for answer in ("first", "second"):
        folder = tmp_path / answer
        folder.mkdir()
        (folder / "loner.py").write_text(f"def speak():\n    return {answer!r}\n")
        monkeypatch.delitem(sys.modules, "loner", raising=False)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            import loner
        assert pool.run(loner.speak) == [answer] * 2


def test_a_closed_world_starts_again():
    with World(2) as pair:
        before = pair.run(ranks.pid)
    after = pair.run(ranks.pid)
    pair.close()
    assert not set(before) & set(after)


def test_a_forked_copy_of_a_world_leaves_the_ranks_alone(world):
    pool = world(2)
    before = pool.run(ranks.pid)
    child = os.fork()
    if child == 0:
        fresh = pool.run(ranks.pid)
        pool.close()
        os._exit(len(set(before) & set(fresh)))
    assert os.waitpid(child, 0)[1] == 0
    assert pool.run(ranks.pid) == before


def test_a_world_that_nobody_holds_ends_its_ranks():
    pids = World(2).run(ranks.pid)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere spawn is the default")
def test_spawned_ranks_do_the_same():
    with World(2, start_method="spawn") as pair:
        assert [total.item() for _, total in pair.run(ranks.ranks_sum)] == [1.0, 1.0]
        with pytest.raises(ValueError, match="bad split") as caught:
            pair.run(ranks.raise_on, 0)
    assert "waiting in barrier()" in str(caught.value)


def test_a_backend_of_ours_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(
        sys.modules["xtrain.testing.backend_choice"].LATE_BACKENDS,
        "xtrain-socket",
        "xtrain.no_such_backends:register",
    )
    with (
        World(2, backend="xtrain-socket") as pair,
        pytest.raises(RuntimeError, match=r"needs xtrain.no_such_backends: No module"),
    ):
        pair.run(ranks.pid)


def test_a_backend_of_ours_is_registered_by_name(monkeypatch, tmp_path):
    (tmp_path / "fake_backend.py").write_text(
        "import torch.distributed as dist\n"
        "def register():\n"
        "    make = lambda store, rank, size, timeout: dist.ProcessGroupGloo(\n"
        "        store, rank, size, timeout)\n"
        "    dist.Backend.register_backend('xtrain-shm', make, devices=['cpu'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(
        sys.modules["xtrain.testing.backend_choice"].LATE_BACKENDS,
        "xtrain-shm",
        "fake_backend:register",
    )
    with World(2, backend="xtrain-shm") as pair:
        assert [total.item() for _, total in pair.run(ranks.ranks_sum)] == [1.0, 1.0]


def test_worlds_of_many_sizes_stay_within_the_bound():
    worlds = Worlds("gloo", "cpu", max_ranks=4)
    one = worlds.get(1).run(ranks.pid)
    two = worlds.get(2).run(ranks.pid)
    assert worlds.get(1).run(ranks.pid) == one
    three = worlds.get(3).run(ranks.pid)  # 1 + 2 + 3 > 4: the size used longest ago
    alive = [pid for pid in one + two + three if os.path.exists(f"/proc/{pid}")]
    assert alive == one + three
    worlds.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in alive)
