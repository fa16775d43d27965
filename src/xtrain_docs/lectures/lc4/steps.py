"""The steps that tensor parallelism is raced with."""

from ...tables import REGISTRY, Table
from ...tables.training_races import steps_table


@REGISTRY
def tensor_parallel_steps() -> Table:
    """Model and batch of each step."""
    from xtrain.bench.races.lc4 import SHAPES, SIZES

    return steps_table([(name, SHAPES[name], size) for name, size in SIZES.items()])
