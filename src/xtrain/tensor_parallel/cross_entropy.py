"""Cross-entropy of logits whose vocabulary is cut over ranks, without gathering them.

    loss = log sum_v exp(x_v) - x_label          the sum runs over all ranks' columns

    all-reduce MAX    [T]      the largest logit, subtracted on all ranks before exp
    all-reduce SUM    [2, T]   sums of exponentials; the label's logit (one rank has it)

Three numbers a token are sent instead of V / N logits (label smoothing: a fourth, the
sum of the logits). Backward sends nothing: a rank's gradient is its columns of the
softmax minus the label's one, and it is computed in the memory of the softmax.

Sources: Shoeybi et al., Megatron-LM, 2019; the z-loss: Chowdhery et al., PaLM, 2022.

Shapes: T tokens, V vocabulary, N ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size, shape_of
from xtrain.tensor_parallel.shards import check_ids


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    group: ProcessGroup | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` where each rank has V / N of the logits.

    Computed in at least fp32. The result is the same on every rank. With "mean" it is
    divided by the number of labels that count; without any it is 0 (torch gives nan).

    Args:
        logits: this rank's columns, [..., V / N].
        labels: ids in the whole vocabulary, [...], equal on all ranks.
        ignore_index: labels of this value do not count.
        label_smoothing: how much of the target is spread evenly over the vocabulary.
        z_loss: times the square of the log of the sum of exponentials, added to each
            token's loss; keeps logits from drifting. PaLM's is 1e-4.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: shapes do not fit, a label is outside the vocabulary, an argument
            is out of its range.
    """
    size = rank_and_size(group)[1]
    both = isinstance(logits, Tensor) and isinstance(labels, Tensor)
    if not both or logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {shape_of(labels)} do not fit logits {shape_of(logits)}: "
            "they have one label for each row of logits"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}, not floating-point")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1 or not 0 <= z_loss < float("inf"):
        raise ValueError(
            f"label_smoothing={label_smoothing} must be within 0 and 1, "
            f"z_loss={z_loss} finite and not below 0"
        )
    check_ids(labels, logits.shape[-1] * size, ignore_index)

    counts = labels.flatten() != ignore_index
    losses = _CrossEntropy.apply(
        logits.flatten(0, -2), labels.flatten(), counts, label_smoothing, z_loss, group
    )
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum().clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        counts: Tensor,
        smoothing: float,
        z_loss: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        rank, size = rank_and_size(group)
        columns = logits.shape[-1]
        local = labels - rank * columns
        others = (local < 0) | (local >= columns)
        local = local.masked_fill(others, 0).unsqueeze(-1)

        wide = torch.promote_types(logits.dtype, torch.float32)
        x = logits.detach().to(wide, copy=True)  # the one buffer; never the caller's
        largest = x.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x -= largest.unsqueeze(-1)
        target = x.gather(-1, local).squeeze(-1).masked_fill(others, 0.0)
        parts = [target, x.sum(-1)] if smoothing else [target]
        x.exp_()
        sums = torch.stack([x.sum(-1), *parts])
        dist.all_reduce(sums, group=group)

        normalizer = sums[0].log()
        x /= sums[0].unsqueeze(-1)  # the probabilities
        loss = normalizer - (1 - smoothing) * sums[1]
        if smoothing:
            loss -= smoothing * sums[2] / (size * columns)
        log_sum_exp = normalizer + largest
        loss += z_loss * log_sum_exp**2
        ctx.save_for_backward(x, local, others, counts, log_sum_exp)
        ctx.smoothing, ctx.z_loss = smoothing, z_loss
        ctx.vocabulary, ctx.dtype, ctx.spent = size * columns, logits.dtype, False
        return loss.masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: vocab_parallel_cross_entropy has no second "
                "derivative, and the gradient would be cut off from its graph"
            )
        if ctx.spent:
            raise RuntimeError(
                "vocab_parallel_cross_entropy writes its gradient into the memory of "
                "the probabilities, so it can go backward once only"
            )
        ctx.spent = True
        x, local, others, counts, log_sum_exp = ctx.saved_tensors
        x *= (1 + 2 * ctx.z_loss * log_sum_exp).unsqueeze(-1)
        target = (1 - ctx.smoothing) * (~others).to(x.dtype)
        x.scatter_add_(-1, local, -target.unsqueeze(-1))
        if ctx.smoothing:
            x -= ctx.smoothing / ctx.vocabulary
        x *= grad.masked_fill(~counts, 0.0).unsqueeze(-1)
        return x.to(ctx.dtype), None, None, None, None, None
