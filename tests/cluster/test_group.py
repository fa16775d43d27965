"""torch's interface on a virtual cluster: each result is what one process computes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.cluster import VirtualCluster

GROUP = "xtrain.cluster.group:VirtualGroup"
MOVES = "xtrain.cluster.moves:Moves"
RUN = "xtrain.cluster.virtual_cluster:VirtualCluster"
SIZES = 1, 2, 3, 4, 8
DTYPES = torch.float64, torch.bfloat16, torch.int32


def numbers(rank: int, count: int, dtype=torch.float64) -> Tensor:
    """Small whole numbers, exact in any dtype."""
    return ((torch.arange(count) * (rank + 3) + rank) % 5 + 1).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, -tensor], dim=-1)[..., 0]


def ended(work, asynchronous: bool) -> None:
    if asynchronous:
        work.wait()
    else:
        assert work is None


def reductions(dtype, put, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    every = torch.stack([numbers(r, 2 * size, dtype) for r in range(size)])
    found, right = [], []
    ops = {dist.ReduceOp.SUM: every.sum(0), dist.ReduceOp.MAX: every.amax(0)}
    if dtype == torch.float64:
        ops[dist.ReduceOp.AVG] = every.mean(0)
        ops[dist.ReduceOp.PRODUCT] = every.prod(0)
    for op, total in ops.items():
        mine = put(every[rank].clone())
        ended(dist.all_reduce(mine, op, async_op=asynchronous), asynchronous)
        part, pieces = put(mine[:2].clone()), [put(p) for p in every[rank].split(2)]
        ended(
            dist.reduce_scatter(part, pieces, op, async_op=asynchronous), asynchronous
        )
        half = put(mine[:2].clone())
        whole = put(every[rank].clone())
        work = dist.reduce_scatter_tensor(half, whole, op, async_op=asynchronous)
        ended(work, asynchronous)
        rooted, root = put(every[rank].clone()), size - 1
        ended(dist.reduce(rooted, root, op, async_op=asynchronous), asynchronous)
        share = total[2 * rank : 2 * rank + 2]
        found += [mine, part, half] + [rooted] * (rank == root)
        right += [total, share, share] + [total] * (rank == root)
    return found, [each.to(dtype) for each in right]


def copies(dtype, put, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    root, wait = size // 2, partial(ended, asynchronous=asynchronous)
    given = put(numbers(rank, 5, dtype))
    sent = given.clone() if rank == root else put(torch.zeros_like(given))
    wait(dist.broadcast(sent, root, async_op=asynchronous))
    uneven = [put(torch.zeros(r + 1, dtype=dtype)) for r in range(size)]
    own = put(numbers(rank, rank + 1, dtype))
    even = [put(torch.zeros(5, dtype=dtype)) for _ in range(size)]
    wait(dist.all_gather(even, given, async_op=asynchronous))
    whole = put(torch.zeros(5 * size, dtype=dtype))
    wait(dist.all_gather_into_tensor(whole, given, async_op=asynchronous))
    at_root = [torch.zeros_like(given) for _ in range(size)] if rank == root else None
    wait(dist.gather(given, at_root, root, async_op=asynchronous))
    part = put(torch.zeros(5, dtype=dtype))
    parts = [numbers(r + 7, 5, dtype) for r in range(size)] if rank == root else None
    wait(dist.scatter(part, parts, root, async_op=asynchronous))
    # rank r sends s + 1 elements to rank s
    rows = [put(numbers(10 * rank + s, s + 1, dtype)) for s in range(size)]
    taken = [put(torch.zeros(rank + 1, dtype=dtype)) for _ in range(size)]
    wait(dist.all_to_all(taken, rows, async_op=asynchronous))
    flat = put(torch.zeros(size * (rank + 1), 2, dtype=dtype))
    table = put(torch.cat(rows)[:, None].repeat(1, 2))
    split = [s + 1 for s in range(size)]
    wait(dist.all_to_all_single(
        flat, table, [rank + 1] * size, split, async_op=asynchronous
    ))  # fmt: skip
    wait(dist.barrier(async_op=asynchronous))
    all_given = [numbers(r, 5, dtype) for r in range(size)]
    arrived = [numbers(10 * r + rank, rank + 1, dtype) for r in range(size)]
    assert own.numel() == uneven[rank].numel()
    found = [sent, *even, whole, *(at_root or []), part, *taken, flat]
    right = [numbers(root, 5, dtype), *all_given, torch.cat(all_given)]
    right += [*(all_given if at_root else []), numbers(rank + 7, 5, dtype), *arrived]
    right.append(torch.cat(arrived)[:, None].repeat(1, 2))
    return found, right


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies(GROUP, MOVES, RUN, "xtrain.cluster.moves:all_to_all")
def test_collectives_give_what_one_process_computes(size):
    for dtype in DTYPES:
        for put in (Tensor.clone, strided):
            for asynchronous in (False, True):
                for calls in (reductions, copies):
                    run = VirtualCluster(size).run(calls, dtype, put, asynchronous)
                    for found, right in run:
                        assert len(found) == len(right)
                        for mine, expected in zip(found, right, strict=True):
                            assert torch.equal(mine, expected), (calls, dtype)
