"""Each rank gets its chunk of the sum that a single process adds up."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    inputs = [randn(size * 250, 3, seed=r) for r in range(size)]
    output = torch.empty(250, 3)
    with Sent() as sent:
        form(output, inputs[rank])
    expected = torch.stack(inputs).sum(0).chunk(size)[rank]
    same(f"this rank's chunk of the sum of {size} tensors", output, expected)
    nbytes = inputs[rank].nbytes
    sends(sent, "(N-1)/N of `input`", (size - 1) / size * nbytes)
