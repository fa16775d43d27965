"""Online softmax: attention over keys that arrive in blocks, in any order.

    state        output (weighted by softmax so far), lse (log of the sum so far)
    a new block  its own output and lse
    together     lse' = log(e^lse + e^lse_block)
                 output' = output e^(lse - lse') + output_block e^(lse_block - lse')

The state is one number per row and the running output; all of attention's algorithms
are this rule. A row that has seen no key has lse = -inf and output 0, and the rule
keeps that: a weight e^(-inf - -inf) would be NaN, so it is 0 there.

Sources: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et
al., FlashAttention, 2022.

Shapes: R any leading dims (batch, heads, queries), K keys, D features of a value.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import problem_of
from xtrain.comm.call_agreement import check_same_call
from xtrain.comm.ring_pass import RingPass

State = tuple[Tensor, Tensor]


def online_softmax(
    scores: Tensor, values: Tensor, block_size: int = 128
) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values and the log-sum-exp, one block of keys at a time.

    Computes in at least fp32. A row whose scores are all -inf gives zeros, and -inf.

    Args:
        scores: [R, K].
        values: [R without its last dim, K, D], or broadcast to it.
        block_size: keys at a time; the last block may be smaller.

    Returns:
        [R, D] of the values' dtype, and [R] in the dtype computed in.

    Raises:
        ValueError: a block size below 1, or different numbers of scores and values.
    """
    if block_size < 1:
        raise ValueError(f"online_softmax: block_size={block_size} is below 1")
    if scores.shape[-1] != values.shape[-2]:
        raise ValueError(
            f"online_softmax: {scores.shape[-1]} scores a row, but "
            f"{values.shape[-2]} values"
        )
    wide = torch.promote_types(scores.dtype, torch.float32)
    state = None
    for scores_block, values_block in zip(
        scores.split(block_size, -1), values.split(block_size, -2), strict=True
    ):
        state = merge(
            state, softmax_block(scores_block.to(wide), values_block.to(wide))
        )
    assert state is not None
    return state[0].to(values.dtype), state[1]


def softmax_block(scores: Tensor, values: Tensor, kept: Tensor | None = None) -> State:
    """Output and lse of one block alone.

    Args:
        kept: factors of the probabilities, which dropout leaves out of the sum of all.
    """
    lse = scores.logsumexp(-1)
    P = weights(scores, lse.unsqueeze(-1))
    return (P if kept is None else P * kept) @ values, lse


def weights(lse: Tensor, total: Tensor) -> Tensor:
    """e^(lse - total), and 0 where total is -inf."""
    return torch.exp(lse - total.masked_fill(total == float("-inf"), 0.0))


def merge(state: State | None, block: State) -> State:
    """The state after one more block."""
    if state is None:
        return block
    (output, lse), (block_output, block_lse) = state, block
    total = torch.logaddexp(lse, block_lse)
    return (
        output * weights(lse, total).unsqueeze(-1)
        + block_output * weights(block_lse, total).unsqueeze(-1),
        total,
    )


def ring_online_softmax(
    scores: Tensor, values: Tensor, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """`online_softmax` over keys of which every rank of a ring has some.

        rank 0 -> rank 1 -> rank 2 -> rank 0      each passes on what it received

    Each rank's output and lse take N - 1 hops; the transfer runs during the merge.

    Args:
        scores: [R, K] with this rank's keys, whose number may differ.
        values: [R without its last dim, K, D].

    Returns:
        The same on every rank, but for the order of rounding.

    Raises:
        ValueError: on every rank: different numbers of scores and values, or rows,
            features or dtypes that differ between ranks.
    """
    check_online_softmax("ring_online_softmax", scores, values, group)
    wide = torch.promote_types(scores.dtype, torch.float32)
    output, lse = softmax_block(scores.to(wide), values.to(wide))
    state = None
    mine = torch.cat([output, lse.unsqueeze(-1)], -1)
    for _, seen in RingPass(group).visits(mine):
        state = merge(state, (seen[..., :-1], seen[..., -1]))
    assert state is not None
    return state[0].to(values.dtype), state[1]


def check_online_softmax(
    name: str, scores: Tensor, values: Tensor, group: ProcessGroup | None
) -> None:
    """ValueError on every rank unless all have the same rows and features."""
    problem = problem_of(lambda: check_scores(scores, values))
    same: dict[str, object] = {}
    if problem is None:
        same |= {"rows": list(scores.shape[:-1]), "features": values.shape[-1]}
        same |= {"scores' dtype": scores.dtype, "values' dtype": values.dtype}
    check_same_call(name, (group,), same, problem)


def check_scores(scores: Tensor, values: Tensor) -> None:
    """ValueError unless these are scores and the values that belong to them."""
    for name, tensor in {"scores": scores, "values": values}.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} are {type(tensor).__name__}, not a tensor")
    if not scores.dim() or values.dim() < 2 or scores.shape[-1] != values.shape[-2]:
        raise ValueError(
            f"scores {list(scores.shape)} and values {list(values.shape)} are not "
            "[..., keys] and [..., keys, features]"
        )
