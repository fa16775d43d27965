"""For each rule of NCCL a program that keeps it and one that breaks it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.nccl_rules.rules import NcclRuleError


def me() -> int:
    return dist.get_rank()


def mine(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((4,), me() + 1, dtype=dtype)


def summed(tensor: Tensor, op: Any = ReduceOp.SUM) -> list:
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def ints() -> list:
    return summed(mine(torch.int32))


def shorts() -> list:
    return summed(mine(torch.int16))


def complex_as_real() -> list:
    return summed(torch.view_as_real(torch.complex(mine(), mine())))


def complex_reduce_scatter() -> list:
    output = torch.zeros(2, dtype=torch.complex128)
    dist.reduce_scatter(output, [torch.ones(2, dtype=torch.complex128)] * 2)
    return output.tolist()


def maximum() -> list:
    return summed(mine(torch.int64), ReduceOp.MAX)


def bitwise_or() -> list:
    return summed(mine(torch.int64), ReduceOp.BOR)


def bool_sum() -> list:
    return summed(torch.tensor([me() == 0, False]))


def bool_average() -> list:
    return summed(torch.tensor([me() == 0, False]), ReduceOp.AVG)


def columns(contiguous: bool) -> list:
    matrix = torch.arange(6.0).view(2, 3).t()
    return summed(matrix.contiguous() if contiguous else matrix)


def contiguous() -> list:
    return columns(True)


def transposed() -> list:
    return columns(False)


def message(tensor: Tensor, into: Tensor, batched: bool = False) -> list:
    """From rank 0 to rank 1."""
    if batched:
        one = dist.P2POp(dist.isend, tensor, 1) if me() == 0 else None
        op = one or dist.P2POp(dist.irecv, into, 0)
        (work,) = dist.batch_isend_irecv([op])
        work.wait()
    elif me() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(into, 0)
    return into.tolist()


def dense_message() -> list:
    return message(torch.ones(3, 2).t(), torch.zeros(2, 3))


def every_other() -> list:
    return message(torch.ones(8)[::2], torch.zeros(8)[::2])


def gathered(size: int) -> list:
    parts = [torch.zeros(4), torch.zeros(size)] if me() == 0 else None
    dist.gather(torch.ones(4 if me() == 0 else size), parts, dst=0)
    return [part.tolist() for part in parts or []]


def gather_equal() -> list:
    return gathered(4)


def gather_unequal() -> list:
    return gathered(3)


def named_source() -> list:
    return message(mine(), torch.zeros(4, dtype=torch.float64))


def any_source() -> int:
    if me() == 0:
        dist.send(mine(), 1)
        return 0
    return dist.recv(mine())


def to_itself_in_a_batch() -> list:
    into = torch.zeros(4, dtype=torch.float64)
    ops = [(dist.isend, mine()), (dist.irecv, into)]
    for work in dist.batch_isend_irecv([dist.P2POp(op, t, me()) for op, t in ops]):
        work.wait()
    return into.tolist()


def to_itself() -> None:
    dist.isend(mine(), me()).wait()


def gather_lists(coalesced: bool) -> list:
    outputs = [[torch.zeros(4, dtype=torch.float64)] for _ in range(2)]
    if coalesced:
        dist.all_gather_coalesced(outputs, [mine()])
    else:
        dist.all_gather([output for (output,) in outputs], mine())
    return [output.tolist() for (output,) in outputs]


def all_gather_of_lists() -> list:
    return gather_lists(coalesced=False)


def coalesced_all_gather_of_lists() -> list:
    return gather_lists(coalesced=True)


def completed() -> list:
    work = dist.all_reduce(tensor := mine(), async_op=True)
    while not work.is_completed():
        pass
    return tensor.tolist()


def success() -> None:
    dist.all_reduce(mine(), async_op=True).is_success()


def two_tags(order: tuple[int, int]) -> list:
    a, b = torch.zeros(1), torch.zeros(1)
    if me() == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (1, 2)]
    else:
        buffers = {1: a, 2: b}
        works = [dist.irecv(buffers[tag], 0, tag=tag) for tag in order]
    for work in works:
        work.wait()
    return [a.item(), b.item()]


def tags_in_order() -> list:
    return two_tags((1, 2))


def tags_in_the_other_order() -> list:
    return two_tags((2, 1))


def sizes_equal() -> list:
    return message(torch.ones(4), torch.zeros(4), batched=True)


def sizes_unequal() -> list:
    with pytest.raises(NcclRuleError, match='rule "sizes"') as caught:
        message(torch.ones(4), torch.zeros(3), batched=True)
    assert summed(mine()) == [3.0] * 4  # the group is whole
    raise caught.value


def same_call() -> list:
    return summed(torch.ones(4))


def other_shapes() -> list:
    return summed(torch.ones(4 + me()))


def ring(batched: bool) -> list:
    size, into = dist.get_world_size(), torch.zeros(4, dtype=torch.float64)
    right, left = (me() + 1) % size, (me() - 1) % size
    if batched:
        sends = dist.P2POp(dist.isend, mine(), right)
        works = dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, into, left)])
        assert len(works) == 1  # and not one for each message
    else:
        works = [dist.isend(mine(), right), dist.irecv(into, left)]
    for work in works:
        work.wait()
    return into.tolist()


def ring_in_a_batch() -> list:
    return ring(batched=True)


def ring_unbatched() -> list:
    return ring(batched=False)


def both_ways(first: str) -> list:
    """Two ranks send to each other, after a message that made their communicator."""
    message(mine(), torch.zeros(4, dtype=torch.float64))
    peer, into = 1 - me(), torch.zeros(4, dtype=torch.float64)
    calls = [lambda: dist.irecv(into, peer), lambda: dist.isend(mine(), peer)]
    if first == "rank 0 sends" and me() == 0:
        calls.reverse()
    for work in [call() for call in calls]:
        work.wait()
    return into.tolist()


def one_sends_first() -> list:
    return both_ways("rank 0 sends")


def both_receive_first() -> list:
    return both_ways("nobody sends")


def batch_of_all() -> list:
    """Rank 2 joins the first call of the group, then two ranks have a batch."""
    dist.barrier()
    return sizes_equal() if me() < 2 else []


def batch_of_two_first() -> list:
    if me() < 2:
        return sizes_equal()
    return message_to_rank_0_first()


def message_to_rank_0_first() -> list:
    dist.recv(torch.zeros(4), 0)  # rank 0 is in its batch, and waits for this rank
    return summed(mine())


def batch_and_reduce(reduce_first: bool) -> list:
    dist.barrier()
    total = mine()
    if reduce_first:
        dist.all_reduce(total)
    received = sizes_equal()
    if not reduce_first:
        dist.all_reduce(total)
    return [received, total.tolist()]


def one_order_in_a_group() -> list:
    return batch_and_reduce(reduce_first=True)


def other_order_in_a_group() -> list:
    return batch_and_reduce(reduce_first=me() == 0)


def overwrite(wait_first: bool) -> list:
    tensor = mine()
    if me() == 1:
        dist.recv(tensor, 0)
        return tensor.tolist()
    work = dist.isend(tensor, 1)
    if wait_first:
        work.wait()
    tensor.zero_()
    work.wait()
    return tensor.tolist()


def write_after_wait() -> list:
    return overwrite(True)


def write_before_wait() -> list:
    return overwrite(False)


def two_groups() -> list[dist.ProcessGroup]:
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        dist.all_reduce(mine(), group=group)
    return groups


def two_streams(wait_first: bool) -> list:
    tensor = mine()
    first, second = two_groups()
    work = dist.all_reduce(tensor, group=first, async_op=True)
    if wait_first:
        work.wait()
    dist.all_reduce(tensor, group=second)
    return tensor.tolist()


def second_group_after_wait() -> list:
    return two_streams(True)


def second_group_at_once() -> list:
    return two_streams(False)


def in_flight(groups: list) -> list:
    tensors = [mine() for _ in groups]
    pairs = zip(tensors, groups, strict=True)
    works = [dist.all_reduce(t, group=group, async_op=True) for t, group in pairs]
    for work in works:
        work.wait()
    return [tensor.tolist() for tensor in tensors]


def groups_in_one_order() -> list:
    return in_flight(two_groups())


def groups_in_two_orders() -> list:
    groups = two_groups()
    return in_flight(groups if me() == 0 else groups[::-1])


def all_come() -> list:
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(tensor := mine(), group=group)
    return tensor.tolist()


def one_skips() -> str:
    """A rank skips a collective; the other hopes to catch an error."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    if me() == 1:
        dist.distributed_c10d._get_default_store().wait(["never"])
    try:
        dist.all_reduce(tensor := mine(), group=group)
        return str(tensor.tolist())
    except RuntimeError:
        return "caught"


class Case(NamedTuple):
    """A rule's programs, and what the right one returns on rank 1."""

    right: Callable[[], Any]
    wrong: Callable[[], Any]
    returns: Any
    ranks: int = 2


ONES, THREES = [1.0] * 4, [3.0] * 4
CASES = {
    "dtype": Case(ints, shorts, [3] * 4),
    "complex": Case(complex_as_real, complex_reduce_scatter, [[3.0, 3.0]] * 4),
    "bitwise": Case(maximum, bitwise_or, [2] * 4),
    "bool average": Case(bool_sum, bool_average, [True, False]),
    "contiguous": Case(contiguous, transposed, [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]),
    "dense": Case(dense_message, every_other, [[1.0] * 3] * 2),
    "equal parts": Case(gather_equal, gather_unequal, []),
    "any source": Case(named_source, any_source, ONES),
    "to itself": Case(to_itself_in_a_batch, to_itself, [2.0] * 4),
    "not there": Case(
        all_gather_of_lists, coalesced_all_gather_of_lists, [ONES, [2.0] * 4]
    ),
    "success": Case(completed, success, THREES),
    "tags": Case(tags_in_order, tags_in_the_other_order, [1.0, 2.0]),
    "sizes": Case(sizes_equal, sizes_unequal, ONES),
    "calls": Case(same_call, other_shapes, [2.0] * 4),
    "first use": Case(ring_in_a_batch, ring_unbatched, ONES, 3),
    "group's first use": Case(batch_of_all, batch_of_two_first, ONES, 3),
    "one queue a pair": Case(one_sends_first, both_receive_first, ONES),
    "one queue a group": Case(
        one_order_in_a_group, other_order_in_a_group, [ONES, THREES]
    ),
    "overwritten": Case(write_after_wait, write_before_wait, ONES),
    "two streams": Case(second_group_after_wait, second_group_at_once, [6.0] * 4),
    "order of groups": Case(groups_in_one_order, groups_in_two_orders, [THREES] * 2),
    "watchdog": Case(all_come, one_skips, THREES),
}
