"""Clipping, as torch does it."""

from collections.abc import Sequence

from torch.tensors import Tensor, stack


def clip_grad_norm_(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place; their norm before that."""
    gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
    norm = stack([g.square().sum() for g in gradients]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.copy_(gradient * factor)
    return norm
