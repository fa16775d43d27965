"""A row layer's output, summed over the ranks: each keeps its slice of the tokens."""

from typing import Any

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    weight = randn(6, 24, seed=2)
    columns = weight.chunk(size, 1)[rank]
    for shape, dim in (((24,), 0), ((2, 24), 1), ((24, 3), 0)):
        x = randn(*shape, 24, seed=1)
        with Sent() as sent:
            y = form(x.chunk(size, -1)[rank], columns, dim)
        whole = x @ weight.mT
        same(f"its tokens in dim {dim}", y, whole.chunk(size, dim)[rank])
        sends(sent, "(N-1)/N of the whole y", (size - 1) / size * whole.nbytes)
