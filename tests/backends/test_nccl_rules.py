"""The backend that keeps NCCL's rules: each rule, kept and broken."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.backends import nccl_cases as cases
from tests.backends.nccl_cases import CASES, mine, summed
from xtrain.backends.nccl_rules.buffers import Buffers
from xtrain.backends.nccl_rules.rules import RULES, NcclRuleError
from xtrain.backends.nccl_rules.streams import CallStream
from xtrain.testing import RankError, World
from xtrain.testing.errors import RankDied

DEADLOCKS = {
    "first use", "group's first use", "one queue a pair", "one queue a group",
}  # fmt: skip


@pytest.fixture
def rules(worlds_of):
    return worlds_of("nccl-rules").get


def test_each_rule_has_a_case():
    assert CASES.keys() == RULES.keys()
    assert all(rule.source and rule.cure for rule in RULES.values())


@pytest.mark.parametrize("rule", CASES)
@pytest.mark.verifies("xtrain.backends.nccl_rules.group:NcclRulesGroup")
def test_a_program_that_keeps_a_rule_runs(rules, rule):
    # Anew, so that what is made at the first use is made here.
    with World(CASES[rule].ranks, "nccl-rules") as world:
        assert world.run(CASES[rule].right)[1] == CASES[rule].returns


@pytest.mark.parametrize("rule", sorted(CASES.keys() - {"watchdog"}))
@pytest.mark.verifies(
    "xtrain.backends.nccl_rules.group:NcclRulesGroup",
    "xtrain.backends.nccl_rules.rules:NcclRuleError",
    "xtrain.backends.nccl_rules.board:NcclDeadlock",
)
def test_a_program_that_breaks_a_rule_is_told(rule):
    case = CASES[rule]
    with World(case.ranks, "nccl-rules") as world, pytest.raises(RankError) as caught:
        world.run(case.wrong)
    text = str(caught.value)
    assert f'(rule "{rule}", {RULES[rule].source}): {RULES[rule].cure}' in text
    if rule in DEADLOCKS:
        told = re.findall(
            r"^  rank (\d): .* at .*nccl_cases.py:\d+.* waits ", text, re.M
        )
        reached = {int(rank) for rank in told}
        assert len(reached) == (3 if rule == "first use" else 2)
        # Every rank that waits raises, also outside the circle.
        assert text.count("NcclDeadlock: deadlock, each of these calls") >= case.ranks
    else:
        assert "nccl_cases.py" in text
        assert issubclass(NcclRuleError, RuntimeError)


@pytest.mark.verifies("xtrain.backends.nccl_rules.watchdog:Watchdog")
def test_the_watchdog_ends_a_process_that_waits_in_vain():
    with World(2, "nccl-rules") as world, pytest.raises(RankDied) as caught:
        world.run(cases.one_skips)
    text = str(caught.value)
    assert "rank 0: died by SIGABRT" in text
    assert "nccl-rules watchdog: all_reduce([4] float64, SUM)" in text
    assert "not over after its timeout of 1 s; nothing came from: rank 1" in text
    assert 'rule "watchdog"' in text


def after_a_death(rank: int, store: str) -> None:
    """Rank 1 dies; rank 0 waits for it, and tells what it caught and when."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    dist.init_process_group(
        "nccl-rules", store=dist.FileStore(store, 2), rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(tensor := mine(), group=group)
        tensor.tolist()
    except dist.DistBackendError as error:
        print(f"after {time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)


@pytest.mark.verifies("xtrain.backends.nccl_rules.watchdog:Watchdog")
def test_a_dead_peer_is_waited_for_until_the_timeout(tmp_path):
    code = (
        "import xtrain.backends; "
        "from tests.backends.test_nccl_rules import after_a_death; "
        "after_a_death({}, {!r})"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(rank, str(tmp_path / "store"))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told, _ = ranks[0].communicate(timeout=300)
    assert ranks[1].wait(300) == -signal.SIGKILL
    waited, _, text = told.partition(" s: ")
    assert float(waited.removeprefix("after ")) >= 2
    assert "nothing came from: rank 1 (dead) (TORCH_NCCL_BLOCKING_WAIT=1)" in text


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def late() -> tuple:
    """What rank 0 sees when rank 1 comes to a call only after that has returned."""
    dist.barrier()
    tensor = mine()
    if dist.get_rank() == 1:
        store().wait(["all_reduce returned"])
    dist.all_reduce(tensor)
    store().set("all_reduce returned", "")
    doubled = (tensor * 2).tolist()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        store().set("rank 1 comes", "")
    dist.barrier()
    return doubled, store().check(["rank 1 comes"])


@pytest.mark.verifies(
    "xtrain.backends.nccl_rules.host_guard:HostGuard",
    "xtrain.backends.nccl_rules.watchdog:Watchdog",
)
def test_wait_orders_the_stream_and_a_barrier_stops_the_program():
    with World(2, "nccl-rules") as world:
        assert world.run(late) == [([6.0] * 4, True)] * 2


def late_to_ddp() -> None:
    """DDP's C++ waits for the sizes of all ranks' parameters, and reads them."""
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
    DistributedDataParallel(torch.nn.Linear(3, 3))


@pytest.mark.verifies("xtrain.backends.nccl_rules.host_guard:HostGuard")
def test_torchs_own_code_does_not_run_past_its_waits(rules):
    rules(2).run(late_to_ddp)


def barrier_by_all_reduce(folder: str, seconds: float) -> list[str]:
    """Rank 1 writes a file late; rank 0 takes an all-reduce for a barrier."""
    dist.barrier()
    if dist.get_rank() == 1:
        with contextlib.suppress(RuntimeError):
            store().wait(["looked"], timedelta(seconds=seconds))
        with open(f"{folder}/file", "w") as file:
            file.write("written")
    dist.all_reduce(torch.zeros(1))
    seen = os.listdir(folder)
    store().set("looked", "")
    return seen


@pytest.mark.verifies("xtrain.backends.nccl_rules.host_guard:HostGuard")
def test_an_all_reduce_is_no_barrier_of_programs(tmp_path):
    with World(2, "nccl-rules") as world:
        seen = world.run(barrier_by_all_reduce, str(tmp_path), 20.0)
    assert seen == [[], ["file"]]
    (tmp_path / "file").unlink()
    with World(2, "gloo") as world:
        seen = world.run(barrier_by_all_reduce, str(tmp_path), 1.0)
    assert seen == [["file"]] * 2


def read_too_early() -> tuple:
    work = dist.all_reduce(tensor := mine(), async_op=True)
    early = tensor.isnan().all().item()
    work.wait()
    return early, tensor.tolist()


def chained() -> tuple:
    """The second call reads what the first one of its stream writes."""
    tensor, gathered = mine(), torch.zeros(8, dtype=torch.float64)
    dist.all_reduce(tensor, async_op=True)
    parts = list(gathered.split(4))
    dist.all_gather(parts, tensor, async_op=True).wait()
    return tensor.tolist(), [part.tolist() for part in parts]


@pytest.mark.verifies("xtrain.backends.nccl_rules.buffers:Buffers")
def test_results_come_when_a_call_of_the_stream_is_waited_for(rules):
    assert rules(2).run(read_too_early) == [(True, [3.0] * 4)] * 2
    assert rules(2).run(chained) == [([3.0] * 4, [[3.0] * 4] * 2)] * 2


def written_behind_autograd() -> list[float]:
    """A gradient whose formula uses a result that calls have written into since."""
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    y = x.exp()  # its gradient is y, which is kept
    dist.all_reduce(y)
    dist.all_reduce(y, async_op=True).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the calls have no gradient
        y.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.verifies("xtrain.backends.nccl_rules.buffers:Buffers")
def test_autograd_does_not_learn_of_what_a_call_writes(rules):
    assert rules(2).run(written_behind_autograd) == [[4.0] * 4] * 2


def eager() -> list:
    """With one queue for everything, a receive from one holds up a send to another."""
    os.environ["XTRAIN_NCCL_RULES_EAGER"] = "1"
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    into = torch.zeros(4, dtype=torch.float64)
    receive = dist.irecv(into, left, group=group)
    dist.isend(mine(), right, group=group).wait()
    receive.wait()
    return into.tolist()


def lazy() -> list:
    """The same with a queue for each pair, whose communicators are there."""
    cases.ring_in_a_batch()
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(size):  # one pair after the other
        if rank == turn:
            dist.send(mine(), (rank + 1) % size)
        elif rank == (turn + 1) % size:
            dist.recv(mine(), turn)
    into = torch.zeros(4, dtype=torch.float64)
    receive = dist.irecv(into, (rank - 1) % size)
    dist.isend(mine(), (rank + 1) % size).wait()
    receive.wait()
    return into.tolist()


@pytest.mark.verifies("xtrain.backends.nccl_rules.group:NcclRulesGroup")
def test_bound_to_a_device_everything_is_one_queue():
    with World(3, "nccl-rules") as world:
        assert world.run(lazy) == [[3.0] * 4, [1.0] * 4, [2.0] * 4]
        with pytest.raises(RankError, match='rule "one queue a group"'):
            world.run(eager)


def many_messages() -> list:
    """Batches with several messages to and from each other rank, of odd sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received, ops = [], []
    for peer in range(size):
        for turn in range(3):
            count = 1 + turn * 1000
            into = torch.zeros(count, dtype=torch.float64)
            received.append(into)
            value = 100.0 * rank + 10 * peer + turn
            sent = torch.full((count,), value, dtype=torch.float64)
            ops += [dist.P2POp(dist.irecv, into, peer)]
            ops += [dist.P2POp(dist.isend, sent, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [(t[0].item(), bool((t == t[0]).all())) for t in received]


class EndsMeanwhile:
    """A call that another thread takes out of its stream while it is looked at."""

    def __init__(self, stream: CallStream):
        self._stream = stream

    @property
    def buffers(self) -> Buffers:
        self._stream.calls.remove(self)
        return Buffers([], [], in_flight=False)


@pytest.mark.verifies("xtrain.backends.nccl_rules.streams:CallStream")
def test_calls_may_end_while_a_stream_is_asked():
    stream = CallStream("a", [0, 1], None, {}, None)
    for ask in (stream.writing, lambda tensors: stream.using(tensors, tensors)):
        stream.calls += [EndsMeanwhile(stream), EndsMeanwhile(stream)]
        assert ask([torch.ones(4)]) is None


def bracketed() -> list:
    """A batch as torch tells its own backends of one."""
    group, device = dist.group.WORLD, torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    into = torch.zeros(4, dtype=torch.float64)
    group._start_coalescing(device)
    dist.isend(mine(), (rank + 1) % size)
    dist.irecv(into, (rank - 1) % size)
    group._end_coalescing(device).wait()
    return into.tolist()


@pytest.mark.verifies("xtrain.backends.nccl_rules.batches:Batches")
def test_a_batch_between_brackets():
    with World(3, "nccl-rules") as world:
        assert world.run(bracketed) == [[3.0] * 4, [1.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.verifies("xtrain.backends.nccl_rules.messages:Wire")
def test_messages_of_a_batch_arrive_in_order(rules, size):
    for rank, values in enumerate(rules(size).run(many_messages)):
        assert values == [
            (100.0 * peer + 10 * rank + turn, True)
            for peer in range(size)
            for turn in range(3)
        ]


def group_of_several_backends() -> str:
    with pytest.raises(ValueError, match="cpu:gloo.*nccl-rules") as caught:
        dist.new_group(backend="cpu:gloo,cuda:nccl-rules")
    return str(caught.value)


def other_name() -> str:
    with pytest.raises(Exception, match="nccl-rule") as caught:
        dist.new_group(backend="nccl-rule")
    return str(caught.value)


@pytest.mark.verifies("xtrain.backends:register")
def test_names_that_cannot_be_served_are_refused(rules):
    for text in rules(2).run(group_of_several_backends):
        assert "make one group of nccl-rules and another" in text
    assert all("nccl-rule" in text for text in rules(2).run(other_name))


def beside_gloo() -> tuple:
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(ours := mine())
    dist.all_reduce(theirs := mine(), group=gloo)
    return ours.tolist(), theirs.tolist(), dist.get_backend(), dist.get_backend(gloo)


@pytest.mark.verifies("xtrain.backends.nccl_rules.group:NcclRulesGroup")
def test_a_gloo_group_stands_beside(rules):
    assert rules(2).run(beside_gloo)[0] == ([3.0] * 4, [3.0] * 4, "nccl-rules", "gloo")
    assert rules(1).run(summed, torch.ones(2)) == [[1.0, 1.0]]
