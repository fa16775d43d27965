"""Every rank gets all inputs in rank order."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    inputs = [randn(250, 3, seed=r) for r in range(size)]
    output = torch.empty(size * 250, 3)
    with Sent() as sent:
        form(output, inputs[rank])
    same(f"{size} inputs of 250 rows in rank order", output, torch.cat(inputs), 0)
    nbytes = output.nbytes
    sends(sent, "(N-1)/N of `output`", (size - 1) / size * nbytes)
