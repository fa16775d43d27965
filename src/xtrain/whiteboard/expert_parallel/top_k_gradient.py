"""Gradient of top-k: what was chosen gets it, and all the rest gets zero.

    values [T, k] of scores [T, E]      backward: each gradient to where its value was

Computes:   the gradient of all scores from that of the k largest ones of each token.
Sends:      nothing.
Leaves out: the choice itself, which is constant almost everywhere and has no gradient.
"""

from torch import Tensor


def top_k_gradient(
    grad_values_Tk: Tensor, experts_Tk: Tensor, num_experts: int
) -> Tensor:
    """A softmax or sigmoid before top-k goes on from here to all logits, or to k."""
    tokens = len(grad_values_Tk)
    grad_scores_TE = grad_values_Tk.new_zeros(tokens, num_experts)
    return grad_scores_TE.scatter_add(1, experts_Tk, grad_values_Tk)
