"""What the page on pipeline and data ranks draws and counts."""

import pytest

from xtrain_docs.lectures.lc5 import data_parallel

RUNNER = "xtrain.pipeline_parallel.runner:PipelineRunner"


def formula(wrapper: str, weights: float, root: float, micro_batches: int) -> list:
    """Bytes a rank sends over two data ranks: in `runner.step`, in the update."""
    layers = weights - root
    return {
        "ddp": [weights, 0.0],
        "zero 1": [weights / 2, weights / 2],
        "zero 2": [weights / 2, weights / 2],
        "fsdp": [(root + 2 * micro_batches * layers + weights) / 2, 0.0],
        "fsdp kept": [weights, 0.0],
    }[wrapper]


@pytest.mark.verifies(RUNNER)
@pytest.mark.parametrize("wrapper", ["ddp", "zero 1", "zero 2", "fsdp", "fsdp kept"])
def test_each_wrapper_sends_over_data_ranks_what_its_formula_says(on_ranks, wrapper):
    for micro_batches in (4, 8):
        found = data_parallel.of_first_stage(wrapper, micro_batches)
        weights = found["weights"]
        right = formula(wrapper, weights, found["root"], micro_batches)
        for during, expected in zip(("step", "update"), right, strict=True):
            assert 0 <= found[during] - expected <= 0.01 * weights  # padding
            shown = data_parallel.sent_over_data(wrapper, micro_batches, during)
            assert shown == found[during] / weights


def test_the_picture_has_a_sum_at_the_end_of_each_rank():
    drawing = data_parallel.when_stages_reduce("one_f_one_b", 3, 4)
    assert drawing.count(">sum</text>") == drawing.count("REDUCE</title>") == 3
