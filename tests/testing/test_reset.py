"""A test finds the ranks as if no other test had run before."""

from tests.testing import ranks
from xtrain.testing.state import MAX_LEFT_GROUPS, MAX_LEFT_ON_CUDA


def test_settings_are_back_and_seeds_differ_between_ranks(world):
    pool = world(2)
    pids = pool.run(ranks.pid)
    clean = pool.run(ranks.look_at_state)
    pool.run(ranks.change_everything)
    assert pool.run(ranks.look_at_state) == clean
    assert pool.run(ranks.pid) == pids
    assert clean[0]["random"] != clean[1]["random"]


def test_a_group_left_behind_does_not_cost_the_ranks_their_life(world):
    pool = world(2)
    kept = [
        pool.run(ranks.leave_a_group_behind) == pool.run(ranks.pid) for _ in range(2)
    ]
    assert any(kept)  # one of them may be the last that earlier tests leave room for


def test_ranks_with_many_groups_left_behind_are_replaced(world):
    pool = world(2)
    limit = MAX_LEFT_ON_CUDA if pool.device == "cuda" else MAX_LEFT_GROUPS
    runs = 2 * limit + 4
    pids = {tuple(pool.run(ranks.leave_a_group_behind)) for _ in range(runs)}
    assert len(pids) == 3  # that many groups, twice over


def test_a_destroyed_default_group_is_replaced(world):
    pool = world(2)
    before = pool.run(ranks.destroy_the_default_group)
    assert not set(pool.run(ranks.pid)) & set(before)
    assert pool.run(ranks.ranks_sum)


def test_tests_may_each_build_the_same_mesh(world):
    """torch keeps meshes in its caches: a destroyed group must not come back."""
    for _ in range(4):
        assert world(4).run(ranks.use_a_mesh) == [0.0] * 4
