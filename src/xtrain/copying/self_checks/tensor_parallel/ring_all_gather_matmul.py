"""Two layers that read x: their features are those of the gathered sequence."""

from typing import Any

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    weights = [randn(24, 6, seed=s) for s in (2, 3)]
    rows = [weight.chunk(size)[rank] for weight in weights]
    for shape, dim in (((24,), 0), ((2, 24), 1), ((24, 3), 0)):
        x = randn(*shape, 6, seed=1)
        with Sent() as sent:
            found = form(x.chunk(size, dim)[rank], rows, dim)
        for number, (y, weight) in enumerate(zip(found, weights, strict=True)):
            part = (x @ weight.mT).chunk(size, -1)[rank]
            same(f"its features of layer {number}, tokens in dim {dim}", y, part)
        sends(sent, "(N-1)/N of the whole x", (size - 1) / size * x.nbytes)
