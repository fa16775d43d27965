"""Pairs turn as complex numbers do, and a score depends on the distance alone."""

import torch

from xtrain.copying.self_checks.harness import Group, Sent, near, randn, sends
from xtrain.whiteboard.tensor_parallel.rotary_embedding import rotary_embedding


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    shared = torch.arange(5) * 7
    for positions in (shared, torch.stack([shared, 40_000 - shared])):  # one a sequence
        for theta in (10_000.0, 500_000.0):
            x = randn(2, 8, 5, 4, seed=1, dtype=dtype)
            with Sent(group) as sent:
                turned = rotary_embedding(x, positions, theta)
            wide = torch.promote_types(dtype, torch.float32)
            steps = torch.arange(2, dtype=wide) * -0.5  # -2j / head_dim
            angles = (positions[..., None, :, None].to(wide) * theta**steps).double()
            turn = torch.polar(torch.ones_like(angles), angles)
            pairs = torch.complex(*x.double().chunk(2, -1)) * turn
            exact = torch.cat([pairs.real, pairs.imag], -1)
            near(f"pairs, theta {theta:,.0f}", turned, exact, dtype, group)
    if dtype == torch.float64:
        q, k = (randn(2, 8, 5, 4, seed=n, dtype=dtype) for n in (1, 2))
        close, far = (
            rotary_embedding(q, shared + shift) @ rotary_embedding(k, shared + shift).mT
            for shift in (0, 1000)
        )
        near("scores after a shift of both by 1,000", far, close, dtype, group)
    sends(sent, "nothing", 0, group)
