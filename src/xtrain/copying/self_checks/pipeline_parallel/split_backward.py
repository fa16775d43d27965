"""Two micro-batches in the order F F B B W W: the gradients of two plain backwards."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6, bias=False)]
    stage = nn.Sequential(*layers)
    inputs = [randn(5, 6, seed=2 * rank + n) for n in (0, 1)]
    dy = randn(5, 6, seed=9)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for x in leaves:
        stage(x).backward(dy)
    named = dict(stage.named_parameters())
    expected = {f"d {name}": gradient(weight) for name, weight in named.items()}
    expected |= {f"dx of micro-batch {n}": gradient(x) for n, x in enumerate(leaves)}

    stage.zero_grad()
    leaves, running = [x.clone().requires_grad_() for x in inputs], []
    with Sent() as sent:
        for x in leaves:  # F0 F1
            with form() as split:
                running.append((split, stage(x)))
        for split, y in running:  # B0 B1
            split.backward_input(y, dy)
        late = [name for name, weight in named.items() if weight.grad is None]
        assert late == ["0.weight", "0.bias", "3.weight"], "they wait for W"
        found = {f"dx of micro-batch {n}": gradient(x) for n, x in enumerate(leaves)}
        for split, _ in running:  # W0 W1
            split.backward_weight()
    found |= {f"d {name}": gradient(weight) for name, weight in named.items()}
    for what, whole in expected.items():
        same(what, found[what], whole)
    sends(sent, "nothing", 0)
