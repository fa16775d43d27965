"""Ulysses inside, a ring outside: more ranks than heads, shorter rings than ranks.

    4 heads on 2 x 2 ranks, tokens 0 to 7, balance "none"

    held                      after the swap of each row          then
    ranks 0 1   01 | 23       tokens 0123: heads 01 | heads 23    columns are rings:
    ranks 2 3   45 | 67       tokens 4567: heads 01 | heads 23    0 <-> 2 and 1 <-> 3

The ring passes keys and values of H / U heads around R ranks rather than of H heads
around R U; the swaps stay among the U ranks of a row, which are those with the fastest
links. The sequence is cut over the ring axis by `balance`, and each of these parts over
the ulysses axis into runs:

    shard_sequence(shard_sequence(x, dim, balance, ring), dim, "none", ulysses)

Source: Fang and Zhao, USP: A Unified Sequence Parallelism Approach, 2024.

Shapes: B batch, H heads, G key heads, S local sequence, D head dim.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.autocast import cast_by_autocast
from xtrain.context_parallel.balance import Balance
from xtrain.context_parallel.block_attention import BlockAttention
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.ring_attention import ring_attention
from xtrain.context_parallel.ulysses import (
    documents_of_row,
    enough_heads,
    heads_divide,
    heads_of_sequence,
    sequence_of_heads,
)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    balance: Balance = "none",
    scale: float | None = None,
    *,
    mesh: DeviceMesh,
    ring: str = "ring",
    ulysses: str = "ulysses",
    block_attention: BlockAttention | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Exact attention over the sequences of all ranks of two axes of a mesh.

    Args:
        q: [B, H, S, D], H a multiple of the ulysses axis.
        k, v: [B, G, S, D].
        mesh: has the axes named by `ring` and `ulysses`; other axes are not used.

    Raises:
        ValueError: on every rank of both axes: shapes that do not fit, heads that do
            not divide.
    """
    inner, outer = mesh[ulysses].get_group(), mesh[ring].get_group()
    q, k, v = cast_by_autocast(q, k, v)
    check_attention(
        "hybrid_attention",
        q, k, v, inner, outer, causal=causal, scale=scale,
        balance=balance, window=window, documents=documents,
        rules=(heads_divide(q, inner),),
    )  # fmt: skip
    if documents is not None:
        documents = documents_of_row(documents, inner)
    q, k, v = (heads_of_sequence(t, inner) for t in (q, *enough_heads(k, v, inner)))
    out = ring_attention(
        q, k, v, causal, balance, scale, outer, block_attention=block_attention,
        window=window, documents=documents,
    )  # fmt: skip
    return sequence_of_heads(out, inner)
