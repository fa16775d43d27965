"""What a failing, dying or hanging rank looks like from the parent."""

import os
import signal
import time

import pytest

from tests.devices import NCCL
from tests.testing import ranks
from xtrain.testing import RankDied, RankError, RankTimeout, expect_error


def kinds(error: RankError) -> list[str]:
    return [report.kind for report in error.reports]


def test_a_failing_rank_keeps_its_type_and_traceback(world):
    with pytest.raises(ValueError, match="bad split on rank 2") as caught:
        world(4).run(ranks.raise_on, 2)
    error = caught.value
    assert isinstance(error, RankError)
    assert error.first.rank == 2
    assert isinstance(error.__cause__, ValueError)
    assert 'raise ValueError(f"bad split on rank {rank}")' in str(error)
    assert kinds(error) == ["waiting", "waiting", "raised", "waiting"]
    assert "rank 3: waiting in barrier(), in raise_on (tests/testing/" in str(error)
    assert len(world(4).run(ranks.ranks_sum)) == 4


def test_ranks_stuck_behind_a_failure_are_not_waited_for(world):
    start = time.monotonic()
    with pytest.raises(ValueError, match="bad split"):
        world(2).run(ranks.raise_on, 1, timeout=600.0)
    assert time.monotonic() - start < 60


def test_ranks_that_share_a_core_have_more_time(world, monkeypatch):
    monkeypatch.setattr("xtrain.testing.world.SECONDS", 0.25)
    for cores, seconds in ((2, 0.5), (4, 0.25), (64, 0.25), (None, 1.0)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        with pytest.raises(RankTimeout, match=f"not finished after {seconds} s"):
            world(4).run(time.sleep, ranks.PLAIN_SLEEP)


def test_bad_input_on_every_rank_leaves_the_ranks_alive(world):
    pool = world(3)
    before = pool.run(ranks.pid)
    errors = expect_error(pool, ranks.raise_everywhere, match="7 is not divisible by 3")
    assert [type(error) for error in errors] == [ValueError] * 3
    assert pool.run(ranks.pid) == before


def test_a_failure_after_communication_replaces_the_ranks(world):
    pool = world(3)
    before = pool.run(ranks.pid)
    expect_error(pool, ranks.raise_after_sending, match="too late")
    assert not set(pool.run(ranks.pid)) & set(before)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (ranks.raise_on, (0,), r"rank 1: waiting in barrier\(\)"),
        (ranks.pid, (), "all returned"),
        (ranks.raise_picky, (), "rank 0: .*needed 3, found 4"),
        (ranks.bad_key, (), "rank 0: KeyError: 'bad'"),
    ],
)
def test_expect_error_wants_the_error_on_every_rank(world, fn, args, expected):
    with pytest.raises(AssertionError, match=expected):
        expect_error(world(2), fn, *args, error=ValueError, match="bad")


def test_an_exception_that_cannot_travel_keeps_its_nearest_type(world):
    with pytest.raises(ranks.PickyError, match="needed 3, found 4"):
        world(1).run(ranks.raise_picky)


def test_an_exception_that_cannot_be_printed_leaves_the_ranks_alive(world):
    pool = world(2)
    before = pool.run(ranks.pid)
    with pytest.raises(ranks.MuteError) as caught:
        pool.run(ranks.raise_mute)
    assert kinds(caught.value) == ["raised", "raised"]
    assert "in raise_mute" in str(caught.value)
    assert pool.run(ranks.pid) == before


def test_an_exception_that_cannot_be_inherited_from_is_the_cause(world):
    with pytest.raises(RankError, match="rank 0 failed") as caught:
        world(1).run(ranks.raise_proud)
    assert isinstance(caught.value.__cause__, ranks.ProudError)
    assert caught.value.__cause__.args == (7,)


def test_a_killed_rank_is_named_with_its_signal_and_replaced(world):
    pool = world(4)
    before = pool.run(ranks.pid)
    with pytest.raises(RankDied, match="rank 1 died by SIGKILL") as caught:
        pool.run(ranks.kill_self, 1)
    assert kinds(caught.value)[1] == "died"
    after = pool.run(ranks.pid)
    assert not set(before) & set(after)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_a_rank_killed_between_runs_is_replaced(world):
    pool = world(2)
    before = pool.run(ranks.pid)
    os.kill(before[0], signal.SIGKILL)
    os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
    assert not set(pool.run(ranks.pid)) & set(before)


def test_ctrl_c_is_left_to_the_parent(world):
    pool = world(2)
    before = pool.run(ranks.pid)
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert pool.run(ranks.pid) == before


def test_a_rank_that_exits_is_named_with_its_code(world):
    with pytest.raises(RankDied, match="exited with code 3 in the middle of a run"):
        world(2).run(ranks.exit_with, 3)


def test_an_abort_inside_gloo_shows_its_message_and_the_python_stack(
    world, xtrain_worlds
):
    if xtrain_worlds.backend != "gloo":
        pytest.skip(f"{xtrain_worlds.backend} does not abort")
    with pytest.raises(RankDied, match="died by SIGABRT, waiting in all_reduce") as e:
        world(2).run(ranks.mismatched_sizes)
    assert "Received data size doesn't match expected size" in str(e.value)
    assert "in mismatched_sizes" in str(e.value)
    assert world(2).run(ranks.ranks_sum)


def test_a_crash_in_another_thread_shows_both_stacks(world):
    with pytest.raises(RankDied, match="died by SIGABRT, .* in receive_from") as caught:
        world(2).run(ranks.crash_in_a_thread)
    own, _, other = str(caught.value).partition("in another of its threads:")
    assert "in receive_from" in own and "in crash_here" not in own
    assert "in crash_here" in other


def test_a_hang_shows_where_every_rank_is(world):
    if world(4).backend in NCCL:
        pytest.skip("NCCL's calls return when they are queued, or block at first use")
    with pytest.raises(RankTimeout, match=r"not finished after 0.5 s") as caught:
        world(4).run(ranks.four_ways_to_hang, timeout=0.5)
    text = str(caught.value)
    places = [report.summary for report in caught.value.reports]
    assert places[0].startswith(
        "waiting in recv(tensor=float32[3], src=2), in receive_from(src=2) (tests/"
    )
    assert places[1].startswith("waiting in `handle.wait()`, in four_ways_to_hang")
    assert places[2].startswith("waiting in all_reduce(tensor=float32[3], op=MAX)")
    assert places[3].startswith("busy in `time.sleep(PLAIN_SLEEP)`")
    assert all("tests/testing/ranks.py:" in place for place in places)
    assert "receive_from(x, 2)" in text  # the caller's line, from the stack
    assert "xtrain/testing/rank.py" not in text  # no frame of the harness
    assert world(4).run(ranks.ranks_sum)


def test_a_rank_that_holds_the_interpreter_lock_still_shows_its_stack(world):
    with pytest.raises(RankTimeout) as caught:
        world(2).run(ranks.hang_with_the_lock_held, timeout=0.3)
    first, second = (report.summary for report in caught.value.reports)
    assert first.startswith("busy, in hang_with_the_lock_held (tests/testing/ranks")
    assert second.startswith("waiting in barrier()")


def test_a_stopped_rank_is_reported_and_killed(world):
    before = world(2).run(ranks.pid)
    with pytest.raises(RankTimeout, match="rank 1: not answering"):
        world(2).run(ranks.stop_self, timeout=0.3)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_what_ranks_write_to_stderr_arrives_rank_by_rank(world, capsys):
    world(2).run(ranks.write_to_stderr)
    expected = [f"warning from rank {rank}\nand from C\n" for rank in (0, 1)]
    assert capsys.readouterr().err == "".join(expected)
