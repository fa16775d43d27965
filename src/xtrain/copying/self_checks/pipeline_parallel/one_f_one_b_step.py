"""Three steps, a stage a rank and 6 micro-batches, equal those of one process."""

from typing import Any

from xtrain.copying.self_checks.pipeline_parallel.steps import check_steps


def check(form: Any, rank: int, size: int) -> None:
    check_steps(form, rank, size, micro_batches=6)
