"""Which rank holds which tokens, and the mask of each block of attention.

    8 tokens on 2 ranks     rank 0          rank 1
    none                    0 1 2 3         4 5 6 7
    striped                 0 2 4 6         1 3 5 7
    zigzag                  0 1 6 7         2 3 4 5

Under a causal mask a query sees the keys before it. Cut into runs ("none"), the last
rank does most of the work, and all others wait for it. Striped and zigzag give every
rank early and late tokens.

With each of them, the mask between the queries of one rank and the keys of another is
one of four kinds, so no mask is ever made:

    all of a slice of the queries see all of a slice of the keys
    local query x sees local keys 0 .. x             (causal)
    local query x sees local keys 0 .. x - 1         (causal, shifted by one)
    no query sees a key                              (skipped)

Sources: Liu et al., Ring Attention, 2023; Brandon et al., Striped Attention, 2023;
zigzag is that of Zhu's ring-flash-attention.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import all_gather_split, split_all_gather
from xtrain.comm.checks import rank_and_size, shape_of
from xtrain.context_parallel.deal import Deal
from xtrain.context_parallel.mask import Kept

BALANCES = ("none", "striped", "zigzag")
Balance = str | Deal
"""One of these names, or which tokens each rank has."""


class Block(NamedTuple):
    """Which local queries see which local keys, as slices of the sequence."""

    queries: slice
    keys: slice
    causal: bool
    """Query x of the slice sees keys 0 to x of the slice, or else all of them."""
    mask: Callable[[], Tensor] | None = None
    """Makes a mask, [B or 1, 1, queries, keys], where that is not all that is seen."""
    kept: Kept | None = None
    """Dropout's factors of slices of these queries and keys."""


def block_of(
    balance: str, query_rank: int, key_rank: int, length: int, causal: bool
) -> Block | None:
    """What the queries of one rank see of another's keys; None for nothing.

    Args:
        length: of both ranks' part of the sequence.
    """
    everything = slice(0, length)
    if not causal:
        return Block(everything, everything, False)
    if query_rank == key_rank:
        return Block(everything, everything, True)  # local order is global order
    later = query_rank > key_rank
    if balance == "none":
        return Block(everything, everything, False) if later else None
    if balance == "striped":
        if later:
            return Block(everything, everything, True)
        shifted = Block(slice(1, length), slice(0, length - 1), True)
        return shifted if length > 1 else None
    half = length // 2
    if later:  # their early half is before all of ours, their late half after
        return Block(everything, slice(0, half), False)
    return Block(slice(half, length), everything, False)


def positions_of(
    rank: int, size: int, length: int, balance: Balance = "none"
) -> Tensor:
    """The global positions of a rank's tokens, [length], in the order it holds them."""
    if isinstance(balance, Deal):
        return balance.positions[rank]
    tokens = torch.arange(length)
    if balance == "striped":
        return tokens * size + rank
    if balance == "zigzag":
        half = length // 2
        late = (2 * size - 1 - rank) * half + tokens[:half]
        return torch.cat([rank * half + tokens[:half], late])
    return rank * length + tokens


def local_positions(
    length: int, balance: Balance = "none", group: ProcessGroup | None = None
) -> Tensor:
    """This rank's `positions_of`, for its rotary embedding: [length]."""
    rank, size = rank_and_size(group)
    check_balance(balance, length * size, size)
    return positions_of(rank, size, length, balance)


def shard_sequence(
    x: Tensor, dim: int, balance: Balance = "none", group: ProcessGroup | None = None
) -> Tensor:
    """This rank's tokens of the whole sequence: tokens, labels, positions, activations.

    Backward gathers the gradients: every rank gets those of the whole `x`.

    Args:
        x: the same on every rank.
        dim: of the sequence.
        balance: a name, or a `Deal`, as `deal_documents` makes one.

    Raises:
        ValueError: the length does not divide as `balance` needs.
    """
    rank, size = rank_and_size(group)
    check_balance(balance, length_of(x, dim), size)
    order = _order(x.shape[dim], balance, size).to(x.device)
    if not x.requires_grad:
        length = x.shape[dim] // size
        return x.index_select(dim, order[rank * length : (rank + 1) * length])
    return split_all_gather(x.index_select(dim, order), dim, group)


def unshard_sequence(
    x: Tensor, dim: int, balance: Balance = "none", group: ProcessGroup | None = None
) -> Tensor:
    """The whole sequence in its order, on every rank; the inverse of `shard_sequence`.

    Backward keeps this rank's part of a gradient that is the same on every rank.
    """
    _, size = rank_and_size(group)
    length = length_of(x, dim) * size
    check_balance(balance, length, size)
    whole = all_gather_split(x, dim, group)
    return whole.index_select(dim, _order(length, balance, size).argsort().to(x.device))


def check_balance(balance: Balance, length: int, size: int) -> None:
    """ValueError unless the length divides as `balance` needs."""
    if isinstance(balance, Deal):
        ranks, tokens = balance.positions.shape
        if (ranks * tokens, ranks) != (length, size):
            raise ValueError(
                f"{balance} is not one of a sequence of {length} on {size} ranks"
            )
        return
    if balance not in BALANCES:
        raise ValueError(f"balance={balance!r} is none of {', '.join(BALANCES)}")
    parts = 2 * size if balance == "zigzag" else size
    if length % parts:
        nearest = length // parts * parts
        raise ValueError(
            f"a sequence of {length} cannot be cut into {parts} equal parts for "
            f"balance={balance!r} on {size} ranks: pad it to {nearest + parts}"
        )


def length_of(x: Tensor, dim: int) -> int:
    """How long `dim` is; ValueError unless `x` is a tensor that has it."""
    dims = range(-x.dim(), x.dim()) if isinstance(x, Tensor) else ()
    if dim not in dims:
        raise ValueError(f"dim={dim!r} is not one of a tensor {shape_of(x)}")
    return x.shape[dim]


def _order(length: int, balance: Balance, size: int) -> Tensor:
    """The positions of all ranks' tokens, rank after rank."""
    local = length // size
    return torch.cat([positions_of(r, size, local, balance) for r in range(size)])
