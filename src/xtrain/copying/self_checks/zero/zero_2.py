"""Five AdamW steps on shards equal five of one process on all batches."""

from typing import Any

from xtrain.copying.self_checks.harness import sends
from xtrain.copying.self_checks.zero.sharded import train


def check(form: Any, rank: int, size: int) -> None:
    zero, back, stepped = train(form, rank, size)
    whole = sum(flat.nbytes for flat, _ in zero.shards.values())  # padded
    nbytes = (size - 1) / size * whole
    sends(back, "(N-1)/N of the parameters in each backward", nbytes)
    sends(stepped, "(N-1)/N in each step", nbytes)
