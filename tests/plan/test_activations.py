"""Bytes of activations: figures of the paper, and bad input.

Figure 1 of the paper is a test of `test_device_memory`.
"""

import pytest

from xtrain.plan import activation_memory

SYMBOL = "xtrain.plan.activations:activation_memory"


@pytest.mark.verifies(SYMBOL)
@pytest.mark.parametrize(
    ("sizes", "percents"),
    [
        ((2048, 4, 6144, 64), (66.84, 49.42, 16.18, 7.64)),  # 22B
        ((2048, 1, 12288, 96), (62.04, 56.53, 18.49, 8.71)),  # 175B
    ],
)
def test_figure_7_of_the_paper_in_percent_of_tensor_parallelism(sizes, percents):
    sequence, selective = {"sequence_parallel": True}, {"recompute": "selective"}
    options = (sequence, selective, sequence | selective, {"recompute": "full"})
    for chosen, expected in zip(options, percents, strict=True):
        share = activation_memory(*sizes, tensor=8, **chosen)
        share /= activation_memory(*sizes, tensor=8)
        assert 100 * share == pytest.approx(expected, rel=6.5e-3)


@pytest.mark.verifies(SYMBOL)
def test_only_with_slices_of_the_sequence_everything_is_divided():
    sizes = (1024, 2, 512, 8)
    one = activation_memory(*sizes)
    assert one == 1024 * 2 * 512 * (34 + 5 * 8 * 1024 / 512)
    for tensor in (2, 4, 8):
        assert activation_memory(*sizes, tensor, True) == one / tensor
        assert activation_memory(*sizes, tensor) > one / tensor
        for slices in (False, True):
            least = activation_memory(*sizes, tensor, slices, recompute="full")
            assert least == 2 * 1024 * 2 * 512 / (tensor if slices else 1)


@pytest.mark.verifies(SYMBOL)
def test_bad_input():
    with pytest.raises(ValueError, match="none may be below 1"):
        activation_memory(1024, 0, 512, 8)
    with pytest.raises(ValueError, match="recompute='some' is not one of"):
        activation_memory(1024, 1, 512, 8, recompute="some")
