"""A recipe whose rank 1 is killed once, after the checkpoint of step 2.

The variable XTRAIN_KILLED names a file that is there afterwards; without the variable
no rank is killed. XTRAIN_PACE is how many seconds each step takes longer.
"""

import os
import signal
import time
from collections.abc import Callable

from xtrain.model import XtrainConfig
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data
from xtrain.train.run import TrainingRun

STEP = 3


def small() -> Recipe:
    if os.environ.get("RANK") == "1" and "XTRAIN_KILLED" in os.environ:
        _after_each_step(_kill_once)
    if "XTRAIN_PACE" in os.environ:
        _after_each_step(lambda run: time.sleep(float(os.environ["XTRAIN_PACE"])))
    model = XtrainConfig(
        vocab_size=257, padded_vocab_size=264, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return Recipe(
        steps=4, model=model, data=Data(sequence=16), global_batch=4,
        dtype="float64", device="cpu",
    )  # fmt: skip


def _after_each_step(action: Callable[[TrainingRun], None]) -> None:
    after_step = TrainingRun.after_step

    def then(run: TrainingRun) -> None:
        after_step(run)
        action(run)

    TrainingRun.after_step = then  # type: ignore[method-assign]


def _kill_once(run: TrainingRun) -> None:
    """SIGKILL for this process, unless the file is there."""
    path = os.environ["XTRAIN_KILLED"]
    if run.step == STEP and not os.path.exists(path):
        with open(path, "x"):
            os.kill(os.getpid(), signal.SIGKILL)
