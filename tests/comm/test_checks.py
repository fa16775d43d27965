"""debug_checks: a mistake of one rank alone is an error on every rank, in words."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from xtrain import comm
from xtrain.comm.calls import check_call, refuse
from xtrain.comm.checks import group_or_world, holds_all, message_device
from xtrain.comm.debug_checks import comparing
from xtrain.comm.local_checks import check_tensor
from xtrain.comm.rooted import root_of

ILLEGAL = "do not make one and the same legal call"


def alone_wrong():
    """(function, right arguments, those of the wrong rank, what the message holds)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    two, three = torch.ones(2), torch.ones(3)
    ints, meta = torch.ones(2, dtype=torch.int64), torch.ones(2, device="meta")
    stranger = size + 3

    def pieces(elements=2, root=0):
        return [torch.ones(elements)] * size if rank == root else None

    SUM, MAX, BAND = ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BAND
    for function in (
        comm.all_reduce,
        comm.ring_all_reduce,
        comm.tree_all_reduce,
        comm.halving_doubling_all_reduce,
        comm.parameter_server_all_reduce,
        comm.one_shot_all_reduce,
    ):
        for wrong, match in (
            ((three, SUM), r"\[2\] & \[3\]"),
            ((ints, SUM), "float32 & int64"),
            ((two, MAX), "SUM & MAX"),
            ((two, BAND), "BAND needs an integer tensor"),
            ((meta, SUM), "meta"),
            ((None, SUM), "NoneType"),
            ((two, None), "None"),
            ((torch.ones(1).expand(2), SUM), "share memory"),
        ):
            yield function, (two, SUM), wrong, match
    for function, end in (
        (comm.broadcast, "src"),
        (comm.broadcast_naive, "src"),
        (comm.reduce, "dst"),
    ):
        for wrong, match in (
            ((three, 0), r"\[2\] & \[3\]"),
            ((ints, 0), "float32 & int64"),
            ((two, 1), f"{end}=0 & {end}=1"),
            ((two, stranger), f"{end}={stranger} is not in the group"),
            ((two, SUM), "is not a rank number"),
        ):
            yield function, (two, 0), wrong, match
    for function, end in ((comm.gather, "dst"), (comm.scatter, "src")):
        ends = r"sends \[[23]\] to rank \d, which expects \[[23]\]"
        for wrong, match in (
            ((two, pieces(root=1), 1), "root=0|must be None"),
            ((two, pieces(), stranger), f"{end}={stranger}"),
            ((three, pieces(3), 0), ends),
            ((two, [two], 0), r"must be None on rank|needs \d tensors"),
        ):
            yield function, (two, pieces(), 0), wrong, match

    all_two, all_three = [two] * size, [three] * size
    each_two = [torch.ones(2) for _ in range(size)]
    one_three = [two if other == rank else three for other in range(size)]
    # One more row to the right neighbour than it expects.
    rows = [1 + (other == (rank + 1) % size) for other in range(size)]
    even, row, column = [1] * size, torch.ones(size, 5), torch.ones(size)
    yield (
        comm.all_reduce,
        (torch.ones(10),),
        (torch.ones(20_000),),
        r"all_reduce\(\[10\] & all_reduce\(\[20000\]",
    )
    yield (
        comm.all_gather,
        (all_two, two),
        ([torch.ones(3)] * size, three),
        r"\[2\] & \[3\]",
    )
    yield (
        comm.all_gather,
        (all_two, two),
        ([*all_two, two], two),
        f"{size + 1} output tensors",
    )
    yield (
        comm.reduce_scatter,
        (two, all_two),
        (three, all_three),
        r"\[2\] & \[3\]",
    )
    yield (
        comm.reduce_scatter_tensor,
        (two, torch.ones(2 * size)),
        (two, torch.ones(2 * size + 1)),
        rf"\[{2 * size + 1}\] must hold {size} times \[2\]",
    )
    yield (
        comm.all_gather_into_tensor,
        (torch.ones(2 * size), two),
        (torch.ones(3 * size), three),
        r"\[2\] & \[3\]",
    )
    yield (
        comm.all_to_all,
        (each_two, all_two),
        (each_two, [ints] * size),
        "float32 & int64",
    )
    yield (
        comm.all_to_all,
        (each_two, all_two),
        (each_two, one_three),
        r"sends \[3\] to rank \d, which expects \[2\]",
    )
    yield (
        comm.all_to_all_single,
        (row, row.clone(), even, even),
        (row, torch.ones(size + 1, 5), even, rows),
        r"sends \[2, 5\] to rank \d, which expects \[1, 5\]",
    )
    yield (
        comm.all_to_all_single,
        (column, column.clone(), even, even),
        (column, column.clone(), even, [2] * size),
        f"sum to {2 * size}",
    )
    yield (
        comm.all_to_all_single,
        (torch.ones(size, 3), torch.ones(size, 3)),
        (torch.ones(size, 4), torch.ones(size, 3)),
        "rows differ",
    )
    yield (
        comm.exchange_split_sizes,
        (even,),
        (even * 2,),
        f"needs {size} sizes",
    )
    yield comm.broadcast_object, ("hello", 0), ("hello", stranger), f"src={stranger}"
    yield comm.broadcast_object, ("hello", 0), ("hello", 1), "src=0 & src=1"


def other_calls():
    """(call, call of the wrong rank, what the message holds)."""
    two = torch.ones(2)
    broadcast = partial(comm.broadcast, two, 0)
    yield broadcast, partial(comm.ring_all_reduce, two), r"broadcast\( & ring_all_red"
    yield comm.barrier, broadcast, "barrier"


def one_rank_wrong(bad: int) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    problems = []
    with comm.debug_checks(), comm.CommLedger() as ledger:
        calls = [(partial(f, *a), partial(f, *b), m) for f, a, b, m in alone_wrong()]
        for *both, match in calls + list(other_calls()):
            before, call = len(ledger.events), both[rank == bad]
            name = call.func.__name__ if hasattr(call, "func") else call.__name__
            try:
                call()
            except ValueError as error:
                text = str(error)
                wanted = [ILLEGAL, *match.split(" & ")]
                if not all(re.search(pattern, text) for pattern in wanted):
                    problems.append(f"{name}: {text!r} does not match {match!r}")
                elif not all(f"rank {r}: " in text for r in range(size)):
                    problems.append(f"{name}: not every rank's call in {text!r}")
            except Exception as error:
                return [*problems, f"{name}: {type(error).__name__} {error}"]
            else:
                return [*problems, f"{name}: did not raise"]
            if len(ledger.events) > before:
                problems.append(f"{name}: sent {ledger.events[before:]}")
        tensor = torch.ones(3)
        comm.ring_all_reduce(tensor)
        assert tensor.tolist() == [size] * 3
    return problems


@pytest.mark.parametrize(("size", "bad"), [(2, 0), (2, 1), (3, 1), (4, 3)])
@pytest.mark.verifies(
    "xtrain.comm.debug_checks:debug_checks",
    "xtrain.comm.calls:check_call",
    "xtrain.comm.calls:refuse",
    "xtrain.comm.debug_checks:compare_across_ranks",
    "xtrain.comm.rooted:root_of",
    "xtrain.comm.rooted:_list_on_root",
)
def test_one_wrong_rank_is_an_error_on_every_rank(world, size, bad):
    for rank, problems in enumerate(world(size).run(one_rank_wrong, bad)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems)


def mesh_of_four():
    intra = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inter = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    node, local = divmod(dist.get_rank(), 2)
    return intra[node], inter[local]


def hierarchical_one_wrong(bad) -> str:
    groups, wrong = mesh_of_four(), dist.get_rank() == bad
    with comm.debug_checks():
        with pytest.raises(ValueError, match=ILLEGAL) as caught:
            comm.hierarchical_all_reduce(
                torch.ones(3 if wrong else 2), ReduceOp.SUM, *groups
            )
        tensor = torch.ones(5)
        comm.hierarchical_all_reduce(tensor, ReduceOp.SUM, *groups)
        assert tensor.tolist() == [4.0] * 5
    return str(caught.value)


@pytest.mark.verifies(
    "xtrain.comm.debug_checks:debug_checks", "xtrain.comm.hierarchical:are_two_axes"
)
def test_one_wrong_rank_of_a_mesh_stops_the_other_nodes_too(world):
    """The ranks of the other node learn of it through the second axis."""
    for bad in (0, 3):
        for text in world(4).run(hierarchical_one_wrong, bad):
            assert all(f"rank {rank}: " in text for rank in range(4))
            assert f"rank {bad}: hierarchical_all_reduce([3], float32, SUM)" in text


def sub_group_names_global_ranks() -> str:
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank not in (1, 3):
        return ""
    with comm.debug_checks(), pytest.raises(ValueError, match="rank 3: ") as caught:
        comm.ring_all_reduce(torch.ones(rank), group=group)
    return str(caught.value)


@pytest.mark.verifies("xtrain.comm.debug_checks:debug_checks")
def test_the_message_names_global_ranks(world):
    text = world(4).run(sub_group_names_global_ranks)[1]
    assert "rank 1: ring_all_reduce([1], float32, SUM)" in text
    assert "rank 3: ring_all_reduce([3], float32, SUM)" in text
    assert "rank 0" not in text


def legal_calls_pass() -> None:
    """The checks are in no ledger and change no result; they can be nested."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert not comparing()
    with comm.debug_checks():
        with comm.CommLedger() as ledger:
            tensor = torch.arange(6.0) + rank
            comm.ring_all_reduce(tensor)
            rows = [rank + other for other in range(size)]
            arriving = comm.exchange_split_sizes(rows)
            output = torch.empty(sum(arriving))
            comm.all_to_all_single(output, torch.ones(sum(rows)), arriving, rows)
            pieces = [torch.ones(r) for r in range(size)]
            comm.gather(torch.ones(rank), pieces if rank == 0 else None)
            comm.scatter(torch.ones(rank), pieces if rank == 0 else None)
            comm.barrier()
            assert comm.all_gather_object(rank) == list(range(size))
        expected = size * torch.arange(6.0) + size * (size - 1) / 2
        assert torch.equal(tensor, expected)
        assert all(event.kind in ("send", "recv") for event in ledger.events)
        with comm.debug_checks(False):
            assert not comparing()
        assert comparing()
    assert not comparing()
    with pytest.raises(KeyError), comm.debug_checks():
        raise KeyError("it is switched off again after an error")
    assert not comparing()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies("xtrain.comm.debug_checks:debug_checks")
def test_legal_calls_pass_and_the_ledger_sees_nothing_more(world, size):
    world(size).run(legal_calls_pass)


ASKED = """
import importlib, os
debug_checks = importlib.import_module("xtrain.comm.debug_checks")
for value in ("1", "0", "", "yes"):
    os.environ["XTRAIN_DEBUG"] = value
    print(importlib.reload(debug_checks).comparing())
"""


def test_an_environment_variable_switches_the_checks_on():
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False", "True"]


@pytest.mark.verifies("xtrain.comm.debug_checks:comparing")
def test_debug_checks_of_one_rank_are_its_own():
    """Ranks may be threads of one process: a switch on one is off on the other."""
    with comm.debug_checks(), ThreadPoolExecutor(1) as other:
        assert comparing()
        assert not other.submit(comparing).result()


def non_members() -> None:
    """Who is not in the group gets a ValueError from every function."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([1])
    assert group_or_world(None) is dist.group.WORLD
    assert group_or_world(group) is group
    assert comm.rank_and_size() == (rank, size)
    assert message_device(None) in dist.group.WORLD._device_types
    if "gloo" in dist.get_backend():
        assert message_device(None).type == "cpu"
    tensor = torch.ones(2)
    if rank == 1:
        assert comm.rank_and_size(group) == (0, 1)
        comm.all_reduce(tensor, group=group)
        return
    many = [tensor] * size
    for name, call in {
        "rank_and_size": lambda: comm.rank_and_size(group),
        "check_call": lambda: check_call("x", group, tensor),
        "root_of": lambda: root_of("x", "src", 0, None, group),
        "refuse": lambda: refuse("x", group, "never reached"),
        "send": lambda: comm.send(tensor, 1, group),
        "recv": lambda: comm.recv(tensor, 1, group),
        "isend": lambda: comm.isend(tensor, group=group, group_dst=0),
        "irecv": lambda: comm.irecv(tensor, group=group, group_src=0),
        "exchange": lambda: comm.exchange(tensor, 1, tensor, 1, group),
        "exchange_all": lambda: comm.exchange_all([], [], group),
        "ring_shift": lambda: comm.ring_shift(tensor, tensor, group=group),
        "broadcast": lambda: comm.broadcast(tensor, 1, group),
        "broadcast_naive": lambda: comm.broadcast_naive(tensor, 1, group),
        "reduce": lambda: comm.reduce(tensor, 1, group=group),
        "gather": lambda: comm.gather(tensor, dst=1, group=group),
        "scatter": lambda: comm.scatter(tensor, src=1, group=group),
        "all_gather": lambda: comm.all_gather(many, tensor, group),
        "ring_all_gather": lambda: comm.ring_all_gather(tensor, tensor, group),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor, many, group=group),
        "ring_reduce_scatter": lambda: comm.ring_reduce_scatter(
            tensor, tensor, group=group
        ),
        "all_to_all": lambda: comm.all_to_all(many, many, group),
        "all_to_all_single": lambda: comm.all_to_all_single(
            tensor, tensor, group=group
        ),
        "exchange_split_sizes": lambda: comm.exchange_split_sizes([1], group),
        "barrier": lambda: comm.barrier(group),
        "all_reduce": lambda: comm.all_reduce(tensor, group=group),
        "ring_all_reduce": lambda: comm.ring_all_reduce(tensor, group=group),
        "tree_all_reduce": lambda: comm.tree_all_reduce(tensor, group=group),
        "halving_doubling": lambda: comm.halving_doubling_all_reduce(
            tensor, group=group
        ),
        "parameter_server": lambda: comm.parameter_server_all_reduce(
            tensor, group=group
        ),
        "one_shot": lambda: comm.one_shot_all_reduce(tensor, group=group),
        "hierarchical": lambda: comm.hierarchical_all_reduce(
            tensor, ReduceOp.SUM, group, group
        ),
        "send_object": lambda: comm.send_object(1, 1, group),
        "recv_object": lambda: comm.recv_object(1, group),
        "broadcast_object": lambda: comm.broadcast_object(1, 1, group),
        "all_gather_object": lambda: comm.all_gather_object(1, group),
    }.items():
        try:
            call()
        except ValueError as error:
            told = f"global rank {rank} is not a member" in str(error)
        else:
            told = False
        assert told, name


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(
    "xtrain.comm.checks:rank_and_size",
    "xtrain.comm.checks:group_or_world",
    "xtrain.comm.checks:message_device",
)
def test_strangers_are_told_that_they_are_not_members(world, size):
    world(size).run(non_members)


@pytest.mark.verifies(
    "xtrain.comm.checks:rank_and_size", "xtrain.comm.checks:group_or_world"
)
def test_no_process_group_is_an_error_that_says_what_to_call():
    assert not dist.is_initialized()
    for call in (
        lambda: comm.rank_and_size(),
        lambda: comm.ring_all_reduce(torch.ones(2)),
        lambda: comm.send(torch.ones(2), 0),
        lambda: comm.barrier(),
        lambda: comm.init_mesh((1,), ("data",)),
    ):
        with pytest.raises(ValueError, match="init_process_group"):
            call()


def check_call_alone() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(2)
    assert check_call("x", None, tensor) == (rank, size)
    whole, short = torch.ones(2 * size), torch.ones(5)
    fits = holds_all(whole, tensor, None)
    assert check_call("x", None, tensor, whole, rules=[fits]) == (rank, size)
    assert check_call("x", None) == (rank, size)
    with pytest.raises(ValueError, match="x: the second rule"):
        check_call(
            "x", None, tensor, rules=[(True, "first"), (False, "the second rule")]
        )
    with pytest.raises(ValueError, match=r"x: \[5\] must hold \d times \[2\]"):
        check_call("x", None, tensor, short, rules=[holds_all(short, tensor, None)])
    with pytest.raises(ValueError, match="x: one device"):
        check_call("x", None, tensor, rules=[(False, "one device")])
    with pytest.raises(ValueError, match="x: cannot write into"):
        check_call("x", None, tensor, written=[torch.ones(1).expand(2)])
    check_call("x", None, torch.ones(1).expand(2), written=[])
    with pytest.raises(ValueError, match="x: because"):
        refuse("x", None, "because")
    check_tensor("x", tensor, None)
    with pytest.raises(ValueError, match="x: expected a tensor, got list"):
        check_tensor("x", [1], None)
    with pytest.raises(ValueError, match=r"x: needs a contiguous.*strides \[3\]"):
        check_tensor("x", torch.ones(6)[::3], None, contiguous=True)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.verifies(
    "xtrain.comm.calls:check_call",
    "xtrain.comm.local_checks:check_tensor",
    "xtrain.comm.calls:refuse",
)
def test_check_call_by_itself(world, size):
    world(size).run(check_call_alone)
