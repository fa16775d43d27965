"""Of the collectives: values, and the bytes that each rank sends."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends

SIZES = {
    "halving_doubling_all_reduce": (1, 2, 4, 8),
    "hierarchical_all_reduce": (2, 4, 8),
}
"""World sizes of checks that are not for any."""


def check_sum(form: Any, rank: int, size: int, formula: str, share: float) -> None:
    """`share` is how often this rank sends the tensor."""
    for numel in (960, 7, 1):
        inputs = [randn(numel, seed=r) for r in range(size)]
        tensor = inputs[rank].clone()
        with Sent() as sent:
            form(tensor)
        total = torch.stack(inputs).sum(0)
        same(f"the sum of {size} tensors of {numel} numbers", tensor, total)
        if numel == 960:
            sends(sent, formula, share * tensor.nbytes)


def children(rank: int, size: int) -> int:
    """How many ranks a rank has below it in the binomial tree of rank 0."""
    powers = (2**i for i in range(size.bit_length()))
    return sum(rank % (2 * p) == 0 and rank + p < size for p in powers)


def check_all_to_all_single(form: Any, rank: int, size: int) -> None:
    """Every rank gets its piece from every other, of any size."""
    table = [[2, 0, 1, 5], [3, 2, 0, 0], [0, 0, 0, 1], [4, 1, 0, 0]]  # [from][to]
    rows = [[table[r % 4][c % 4] for c in range(size)] for r in range(size)]
    inputs = [randn(sum(rows[r]), 100, seed=r) for r in range(size)]
    arriving = [row[rank] for row in rows]
    output = torch.empty(sum(arriving), 100)
    with Sent() as sent:
        form(output, inputs[rank], arriving, rows[rank])
    pieces = [t.split(row)[rank] for t, row in zip(inputs, rows, strict=True)]
    same("unequal pieces from every rank", output, torch.cat(pieces), 0)
    away, nbytes = len(inputs[rank]) - rows[rank][rank], 100 * output.itemsize
    sends(sent, "`input` less this rank's own piece", away * nbytes)

    back = torch.empty_like(inputs[rank])
    form(back, output, rows[rank], arriving)
    same("the way back", back, inputs[rank], 0)
    even, other = randn(6 * size, seed=rank), torch.empty(6 * size)
    form(other, even)
    sixths = [randn(6 * size, seed=r).chunk(size)[rank] for r in range(size)]
    same("equal pieces need no list", other, torch.cat(sixths), 0)


def check_broadcast(form: Any, rank: int, size: int) -> None:
    """Every rank gets the root's tensor, for every root."""
    for src in reversed(range(size)):
        tensor = randn(960, seed=rank)
        with Sent() as sent:
            form(tensor, global_ranks()[src])
        same(f"960 numbers of rank {src}", tensor, randn(960, seed=src), 0)
    sends(sent, "the root ceil(log2 N) of them", children(rank, size) * tensor.nbytes)


def check_exchange(form: Any, rank: int, size: int) -> None:
    """Every rank gets what its left neighbour sent."""
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, incoming = randn(960, seed=rank), torch.empty(960)
    with Sent() as sent:
        form(outgoing, global_ranks()[right], incoming, global_ranks()[left])
    same("960 numbers from the left neighbour", incoming, randn(960, seed=left), 0)
    nbytes = outgoing.nbytes
    sends(sent, "one tensor", nbytes * (size > 1))


def check_gather(form: Any, rank: int, size: int) -> None:
    """Every root gets every rank's tensor."""
    inputs = [randn(960, seed=r) for r in range(size)]
    everyone = torch.stack(inputs)
    for dst in reversed(range(size)):
        pieces = [torch.zeros(960) for _ in inputs] if rank == dst else None
        with Sent() as sent:
            form(inputs[rank], pieces, global_ranks()[dst])
        found = everyone if pieces is None else torch.stack(pieces)
        same(f"{size} tensors on rank {dst}, in rank order", found, everyone, 0)
    nbytes = inputs[rank].nbytes
    sends(sent, "one tensor from each rank but the root", (rank != 0) * nbytes)


def check_halving_doubling_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum is the one that a single process adds up."""
    check_sum(form, rank, size, "2(N-1)/N of the tensor", 2 * (size - 1) / size)


def check_hierarchical_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum over nodes of two ranks is the one of a single process."""
    count, ranks = size // 2, list(range(size))  # nodes
    nodes = [dist.new_group(ranks[2 * i : 2 * i + 2]) for i in range(count)]
    peers = [dist.new_group(ranks[i::2]) for i in range(2)]
    in_groups = partial(form, intra_group=nodes[rank // 2], inter_group=peers[rank % 2])
    inside, between = 2 * (2 - 1) / 2, 2 * (count - 1) / count / 2
    words = "2(G-1)/G of the tensor in its node of G, 2(K-1)/K of 1/G between K nodes"
    check_sum(in_groups, rank, size, words, inside + between)


def check_one_shot_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum is the one that a single process adds up."""
    check_sum(form, rank, size, "N-1 times the tensor", size - 1)


def check_parameter_server_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum is the one that a single process adds up."""
    words = "one tensor from each worker, N-1 from the server"
    check_sum(form, rank, size, words, 1 if rank else size - 1)


def check_reduce(form: Any, rank: int, size: int) -> None:
    """Every root gets the sum; the other ranks keep what they have."""
    inputs = [randn(960, seed=r) for r in range(size)]
    total = torch.stack(inputs).sum(0)
    for dst in reversed(range(size)):
        tensor = inputs[rank].clone()
        with Sent() as sent:
            form(tensor, global_ranks()[dst])
        expected = total if rank == dst else inputs[rank]
        same(f"the sum of {size} tensors on rank {dst} alone", tensor, expected)
    sends(sent, "one tensor from each rank but the root", (rank != 0) * tensor.nbytes)


def check_ring_all_gather(form: Any, rank: int, size: int) -> None:
    """Every rank gets all inputs in rank order."""
    inputs = [randn(250, 3, seed=r) for r in range(size)]
    output = torch.empty(size * 250, 3)
    with Sent() as sent:
        form(output, inputs[rank])
    same(f"{size} inputs of 250 rows in rank order", output, torch.cat(inputs), 0)
    nbytes = output.nbytes
    sends(sent, "(N-1)/N of `output`", (size - 1) / size * nbytes)


def check_ring_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum is the one that a single process adds up."""
    check_sum(form, rank, size, "2(N-1)/N of the tensor", 2 * (size - 1) / size)


def check_ring_reduce_scatter(form: Any, rank: int, size: int) -> None:
    """Each rank gets its chunk of the sum that a single process adds up."""
    inputs = [randn(size * 250, 3, seed=r) for r in range(size)]
    output = torch.empty(250, 3)
    with Sent() as sent:
        form(output, inputs[rank])
    expected = torch.stack(inputs).sum(0).chunk(size)[rank]
    same(f"this rank's chunk of the sum of {size} tensors", output, expected)
    nbytes = inputs[rank].nbytes
    sends(sent, "(N-1)/N of `input`", (size - 1) / size * nbytes)


def check_scatter(form: Any, rank: int, size: int) -> None:
    """Every rank gets its entry of the root's list, for every root."""
    for src in reversed(range(size)):
        inputs = [randn(960, seed=10 * src + r) for r in range(size)]
        tensor = torch.zeros(960)
        with Sent() as sent:
            form(tensor, inputs if rank == src else None, global_ranks()[src])
        same(f"an entry of rank {src}'s list on each rank", tensor, inputs[rank], 0)
    sends(sent, "N-1 tensors from the root", (rank == 0) * (size - 1) * tensor.nbytes)


def check_tree_all_reduce(form: Any, rank: int, size: int) -> None:
    """The sum is the one that a single process adds up."""
    share = children(rank, size) + (rank > 0)
    check_sum(form, rank, size, "ceil(log2 N) by the root", share)
