"""Newton-Schulz: a matrix with its singular values near 1, by matrix products alone.

    X <- a X + b (X X^T) X + c (X X^T)^2 X
    of X = U S V^T this makes U (a S + b S^3 + c S^5) V^T

No singular value is computed. The usual coefficients take small values up quickly, by
3.4445 a step, and leave the others near 1 rather than at 1.
Costs about 4 r^2 c + 2 r^3 operations a step, r the smaller side. It sends nothing.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
"""

import math
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def newton_schulz(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Matrices [rows, columns] or [E, rows, columns] with singular values near 1.

    A matrix is divided by its norm first. With the usual coefficients five steps then
    take all singular values above 0.002 to between 0.68 and 1.21.

    Args:
        eps: the smallest norm by which a matrix is divided: zeros stay zeros.
        dtype: of the computation and of the result.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)  # its square is the smaller one
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        square = x @ x.mT
        polynomial = add_product(square, square, square, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if tall else x


def move(
    part: Tensor, update: Tensor, shape: tuple[int, ...], group: dict[str, Any]
) -> None:
    """Decay and step a part of a matrix of this shape, by its part of the update."""
    rows, columns = shape[-2:]
    scale = math.sqrt(max(1, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    lr = float(group["lr"])
    part.mul_(1 - lr * group["weight_decay"])
    part.add_(update, alpha=-lr * scale)
