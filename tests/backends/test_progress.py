"""Waiting ends: groups can be destroyed, callbacks communicate, timeouts are kept."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from tests.backends.faults import Ranks, only_in_a_wait, stay
from xtrain.backends.callbacks import Callbacks
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.progress import Progress

# What the tests here prove, for their marks.
PROGRESS = (
    "xtrain.backends.operation:Operation",
    "xtrain.backends.progress:Progress",
)

LARGE = 3_000_000  # floats: a collective of many reads and writes
PATIENT = 60.0  # seconds to wait for what comes at once on a quiet machine


# --------------------------------------------------------------------------- destroying


def in_time(call) -> None:
    """Run a call on another thread; fail when it does not return."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENT)
    assert not thread.is_alive(), "it never returns"


class Gate(threading.Event):
    """Has another thread close the group just before the event is cleared."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress, self._closing = progress, None
        self.woken = threading.Event()

    def set(self) -> None:
        super().set()
        if threading.current_thread() is self._closing:
            self.woken.set()

    def clear(self) -> None:
        error = RuntimeError("closed")
        self._closing = threading.Thread(target=self._progress.close, args=(error,))
        self._closing.start()
        self.woken.wait(0.5)  # now, if it can; or it waits until this is over
        super().clear()


def after(passes: int) -> Steps:
    for _ in range(passes):
        yield


@pytest.mark.verifies(*PROGRESS)
def test_a_group_closed_while_its_thread_goes_to_sleep_is_closed():
    """The thread finds nothing to do and clears its event; just then comes `close`."""
    progress = Progress(lambda operation: None)
    gate = progress._pending = Gate(progress)
    operation = Operation("some", after(3))
    progress.post("some", operation)
    assert gate.woken.wait(PATIENT)
    in_time(gate._closing.join)
    in_time(progress._thread.join)
    assert operation.done and operation.error is None


@pytest.mark.verifies(*PROGRESS)
def test_a_closed_group_ends_what_is_posted_and_starts_no_thread():
    progress = Progress(lambda operation: None)
    progress.close(RuntimeError("closed"))
    for post in (progress.post, progress.run):
        operation = Operation("some", after(1000))
        with contextlib.suppress(RuntimeError):
            post("some", operation)
        with pytest.raises(RuntimeError, match="closed"):
            progress.wait(operation)
    progress._wake_background()
    assert progress._thread is None


@pytest.mark.verifies(*PROGRESS)
def test_a_group_is_closed_while_another_thread_waits_in_it():
    progress = Progress(lambda operation: None)
    waits, failed = threading.Event(), threading.Event()

    def endless() -> Steps:
        while True:
            if threading.current_thread() is waiting:
                waits.set()
            yield

    operation = Operation("some", endless())

    def wait() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            progress.wait(operation)
        failed.set()

    waiting = threading.Thread(target=wait, daemon=True)
    progress.post("some", operation)
    waiting.start()
    assert waits.wait(PATIENT)
    in_time(lambda: progress.close(RuntimeError("closed")))
    assert failed.wait(PATIENT)


def come_and_go(say, enter, rank: int, rounds: int) -> None:
    store = dist.FileStore(os.environ["STORE"], 2)
    for turn in range(rounds):
        dist.init_process_group(
            os.environ["BACKEND"], store=dist.PrefixStore(str(turn), store), rank=rank,
            world_size=2, timeout=timedelta(seconds=PATIENT),
        )  # fmt: skip
        total = torch.ones(50)
        dist.all_reduce(total, async_op=True).wait()
        dist.barrier()
        dist.destroy_process_group()
        assert total[0].item() == 2


@pytest.mark.verifies(*PROGRESS)
def test_destroying_a_group_always_returns(backend, tmp_path):
    rounds = 200
    environment = {"STORE": str(tmp_path / "store"), "BACKEND": backend}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with Ranks(
        backend, 2, come_and_go, rounds, join=False, environment=environment
    ) as ranks:
        assert set(ranks.hear(rounds * 2.0)) == {("ended", None)}


def destroyed_by_a_signal(say) -> None:
    """A handler runs on top of whatever the waiting thread was doing."""
    dist.barrier()
    if dist.get_rank() == 1:
        say("here")
        stay()
    signal.signal(
        signal.SIGUSR1, only_in_a_wait(lambda *_: dist.destroy_process_group())
    )
    say("here")
    with pytest.raises(RuntimeError, match="destroyed"):
        dist.all_reduce(torch.ones(LARGE))


@pytest.mark.verifies(*PROGRESS)
def test_a_signal_handler_may_destroy_the_group_under_a_wait(backend):
    with Ranks(backend, 2, destroyed_by_a_signal, timeout=PATIENT) as ranks:
        ranks.hear(PATIENT)
        ranks[0].kill(signal.SIGUSR1)
        assert ranks[0].hear(PATIENT) == ("ended", None)


# ---------------------------------------------------------------------------- callbacks


def communicating_callbacks(path: str) -> None:
    """Callbacks that reduce again, three ways, while the main thread sleeps in wait.

    One rank comes late each time: no call is over when it has just been posted.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, size)

    def reduced(tensor, turn: str, late: int) -> torch.futures.Future:
        if rank == late:
            store.wait([f"{len(tensor)} {turn}"])
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 1 - late:
            store.set(f"{len(tensor)} {turn}", "posted")
        return work.get_future()

    def again(future):
        (tensor,) = future.value()
        if rank == 0:
            store.wait([f"{len(tensor)} again"])
        elif rank == 1:
            store.set(f"{len(tensor)} again", "reduces")
        dist.all_reduce(tensor)
        return [tensor]

    def by_future(future):
        return reduced(future.value()[0], "by future", late=1).wait()

    def by_another_future(future):
        another = reduced(future.value()[0], "by another future", late=0)
        return another.then(lambda f: f.value()).wait()

    for count in (1, 300_000):
        tensor = torch.ones(count)
        future = reduced(tensor, "first", late=1)
        for callback in (again, by_future, by_another_future):
            future = future.then(callback)
        (result,) = future.wait()
        assert torch.equal(result, torch.full((count,), float(size**4)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(*PROGRESS, "xtrain.backends.callbacks:Callbacks")
def test_callbacks_may_communicate(ours, size, tmp_path):
    path = str(tmp_path / "store")
    ours(size).run(communicating_callbacks, path, timeout=PATIENT)


def compressed() -> list[torch.Tensor]:
    group = dist.group.WORLD
    runner = getattr(group, "_runner", None)
    if runner is not None:  # have calls go on in the background, as long ones do
        kept, runner.post_seconds = runner.post_seconds, 0.0
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32))
    ddp = DistributedDataParallel(model)
    state = power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(16, 48, generator=generator)).square().mean().backward()
        optimizer.step()
    compression_rate = state.compression_stats()[0]
    assert compression_rate > 2  # it did compress
    if runner is not None:
        runner.post_seconds = kept
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.verifies(*PROGRESS)
def test_power_sgd_trains_as_on_gloo(ours, worlds_of):
    """torch's hook waits for two more all-reduces in callbacks of the first."""
    on_ours = ours(2).run(compressed, timeout=PATIENT)
    on_gloo = worlds_of("gloo").get(2).run(compressed, timeout=PATIENT)
    for ours_, gloos in zip(on_ours, on_gloo, strict=True):
        for one, other in zip(ours_, gloos, strict=True):
            torch.testing.assert_close(one, other)


def called_back(callback) -> torch.futures.Future:
    """The future of a callback that waits for a message sent after it was given."""
    other = dist.get_rank() ^ 1
    future = dist.irecv(torch.empty(1), other).get_future().then(callback)
    dist.barrier()
    dist.send(torch.ones(1), other)
    return future


def blocking_and_failing_callbacks() -> None:
    size = dist.get_world_size()
    release, begun = threading.Event(), threading.Event()

    def blocks(future):
        begun.set()
        assert release.wait(PATIENT)
        return "released"

    def fails(future):
        raise KeyError("mine")

    blocked = called_back(blocks)
    assert begun.wait(PATIENT)
    failed = called_back(fails)
    with pytest.raises(RuntimeError, match="mine"):
        failed.wait()  # not held up by the one that blocks
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total[0].item() == size
    release.set()
    assert blocked.wait() == "released"


@pytest.mark.verifies(*PROGRESS)
def test_a_callback_that_blocks_or_fails_stops_nothing_else(ours):
    ours(2).run(blocking_and_failing_callbacks, timeout=PATIENT)


def destroyed_under_a_callback(say) -> None:
    release, begun = threading.Event(), threading.Event()

    def blocks(future):
        begun.set()
        release.wait(PATIENT)

    future = called_back(blocks)
    assert begun.wait(PATIENT)
    never = dist.irecv(torch.empty(1), dist.get_rank() ^ 1).get_future()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"destroyed|left"):
        never.wait()
    assert not future.done()
    release.set()
    future.wait()


@pytest.mark.verifies(*PROGRESS)
def test_a_group_is_destroyed_while_a_callback_blocks(backend):
    with Ranks(backend, 2, destroyed_under_a_callback) as ranks:
        assert set(ranks.hear(PATIENT)) == {("ended", None)}


def destroyed_by_a_callback(say) -> None:
    sent = threading.Event()

    def destroys(future):
        assert sent.wait(PATIENT)
        dist.destroy_process_group()

    future = called_back(destroys)
    sent.set()
    future.wait()
    assert not dist.is_initialized()


@pytest.mark.verifies(*PROGRESS)
def test_a_callback_may_destroy_the_group(backend):
    with Ranks(backend, 2, destroyed_by_a_callback) as ranks:
        assert set(ranks.hear(PATIENT)) == {("ended", None)}


@pytest.mark.verifies("xtrain.backends.callbacks:Callbacks")
def test_callbacks_run_one_by_one_in_order_on_one_thread():
    callbacks, seen, over = Callbacks(), [], threading.Event()
    for number in range(100):
        callbacks.add(lambda n=number: seen.append((n, threading.get_ident())))
    callbacks.add(over.set)
    assert over.wait(PATIENT)
    assert [number for number, _ in seen] == [*range(100)]
    callbacks.close()
    assert not callbacks._threads


# ----------------------------------------------------------------------------- timeouts


def late_for_a_barrier(say) -> None:
    """A call's own timeout counts, shorter or longer than the group's."""
    patient, hasty = dist.new_group(), dist.new_group()
    hasty.set_timeout(timedelta(seconds=0.1))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)  # the group's time passes, the call's does not
    dist.barrier(hasty, timeout=timedelta(seconds=PATIENT))
    if dist.get_rank() == 1:
        stay()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"timed out.*barrier.*not there: rank 1"):
        dist.barrier(patient, timeout=timedelta(seconds=0.3))
    assert 0.3 <= time.monotonic() - began < PATIENT
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=0.3)
    work = dist.group.WORLD.allreduce([torch.ones(1)], opts)
    with pytest.raises(RuntimeError, match=r"timed out.*all_reduce.*rank 1"):
        work.wait()
    with pytest.raises(RuntimeError, match=r"timed out.*barrier.*rank 1"):
        dist.barrier(hasty)


@pytest.mark.verifies(*PROGRESS, "xtrain.backends.peers:PeerMonitor")
def test_a_call_has_the_timeout_that_it_is_given(backend):
    with Ranks(backend, 2, late_for_a_barrier, timeout=2 * PATIENT) as ranks:
        assert ranks[0].hear(PATIENT) == ("ended", None)


def waits_for_a_while() -> None:
    """The wait ends at its time; the call goes on, and so does the group."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        received = torch.zeros(1)
        receive = dist.irecv(received, 0)
        with pytest.raises(RuntimeError, match=r"not done after 0.05 s: recv\("):
            receive.wait(timedelta(seconds=0.05))
        assert not receive.is_completed()
        dist.send(torch.ones(1), 0)
        receive.wait()  # rank 0 has given up waiting
        assert received.item() == 1
    total = torch.full((LARGE,), rank + 1.0)
    work = dist.all_reduce(total, async_op=True)
    if rank == 0:
        for seconds in (0.05, 0.2):
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=f"not done after {seconds} s: all_"):
                work.wait(timedelta(seconds=seconds))
            assert time.monotonic() - began >= seconds
        assert not work.is_completed()
        dist.recv(torch.zeros(1), 1)  # rank 1 has given up waiting
        dist.send(torch.ones(1), 1)
    assert work.wait(timedelta(seconds=PATIENT))
    assert total[0].item() == total[-1].item() == 3
    dist.barrier()


@pytest.mark.verifies(*PROGRESS)
def test_a_wait_ends_at_its_time_and_the_group_lives_on(ours):
    ours(2).run(waits_for_a_while, timeout=2 * PATIENT)


# ------------------------------------------------------------------------ stopped ranks


def reducing() -> None:
    dist.all_reduce(torch.ones(LARGE))


def gathering() -> None:
    parts = [torch.empty(LARGE // 4) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.ones(LARGE // 4))


def exchanging() -> None:
    dist.all_to_all_single(torch.empty(LARGE), torch.ones(LARGE))


def passing_on() -> None:
    """Rank 2 waits for rank 0, and only that one for rank 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    request = dist.irecv(torch.empty(LARGE // 4), (rank + 1) % size)
    dist.send(torch.ones(LARGE // 4), (rank - 1) % size)
    request.wait()


def over_and_over(say, call, calls: int) -> None:
    dist.barrier()
    for _ in range(calls):
        call()
    say("here")
    while True:
        call()


@pytest.mark.verifies(
    *PROGRESS,
    "xtrain.backends.peers:Peers",
    "xtrain.backends.peers:PeerMonitor",
)
def test_a_rank_that_is_stopped_is_named_wherever_it_stopped(backend):
    """In the middle of a call all ranks are there, and one of them does not go on."""
    with contextlib.ExitStack() as stack:
        programs = []
        moments = [(reducing, 0, True), (gathering, 3, False)]
        moments += [(exchanging, 2, True), (passing_on, 1, False)]
        for call, calls, linger in moments:
            how = {"timeout": 6.0, "linger": linger}
            ranks = stack.enter_context(
                Ranks(backend, 3, over_and_over, call, calls, **how)
            )
            ranks.hear(PATIENT)
            ranks[1].kill(signal.SIGSTOP)
            programs.append((call.__name__, ranks))
        for name, ranks in programs:
            for survivor in (0, 2):
                word = ranks[survivor].hear(PATIENT)
                assert word[0] == "raised", (name, word)
                named = "rank 1 (stopped)" in word[2] or "stopped: rank 1" in word[2]
                assert named, (name, word)


def form_and_leave(rounds: int) -> int:
    for _ in range(rounds):
        group = dist.new_group(backend=dist.get_backend())
        dist.barrier(group)
        dist.destroy_process_group(group)
    return rounds


@pytest.mark.verifies(*PROGRESS)
def test_many_ranks_form_a_group_again_and_again(ours):
    """Ranks look at each other while each becomes a member, at any moment of it."""
    assert ours(8).run(form_and_leave, 40, timeout=120.0) == [40] * 8
