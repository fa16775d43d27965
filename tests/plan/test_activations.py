"""Bytes of activations: figures of the paper, and bad input."""

import pytest

from xtrain.plan import activation_memory

SYMBOL = "xtrain.plan.activations:activation_memory"
GIB = 2**30
# sequence, batch, hidden, heads; layers, tensor ranks, factor of the interleaving
PAPER = {
    "22B": ((2048, 4, 6144, 64), 48, 8, 1),
    "175B": ((2048, 1, 12288, 96), 96, 8, 1 + 7 / (8 * 3)),
    "530B": ((2048, 1, 20480, 128), 105, 8, 1 + 34 / (35 * 3)),
    "1T": ((2048, 1, 25600, 160), 128, 8, 1),
}


def whole(name: str, **options) -> float:
    """GiB of all layers of the first stage."""
    sizes, layers, tensor, factor = PAPER[name]
    each = activation_memory(*sizes, tensor=tensor, **options)
    return each * layers * factor / GIB


@pytest.mark.verifies(SYMBOL)
@pytest.mark.parametrize(
    ("name", "baseline", "both"),
    [
        ("22B", 59.25, 9.5625),
        ("175B", 66.84375, 12.3516),
        ("530B", 114.0234, 23.0762),
        ("1T", 131.25, 26.5625),
    ],
)
def test_figure_1_of_the_paper(name, baseline, both):
    """Tensor parallelism alone; with slices of the sequence and selective recompute."""
    assert whole(name) == pytest.approx(baseline, rel=1e-5)
    found = whole(name, sequence_parallel=True, recompute="selective")
    assert found == pytest.approx(both, rel=1e-5)


@pytest.mark.verifies(SYMBOL)
def test_figure_7_of_the_paper_in_percent_of_tensor_parallelism():
    for name, percents in {"22B": (66.84, 49.42, 16.18, 7.64),
                           "175B": (62.04, 56.53, 18.49, 8.71)}.items():  # fmt: skip
        sequence = {"sequence_parallel": True}
        options = (
            sequence,
            {"recompute": "selective"},
            sequence | {"recompute": "selective"},
            {"recompute": "full"},
        )
        for chosen, expected in zip(options, percents, strict=True):
            share = 100 * whole(name, **chosen) / whole(name)
            assert share == pytest.approx(expected, rel=6.5e-3)


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
