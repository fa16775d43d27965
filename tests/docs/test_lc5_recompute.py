"""Figures and numbers on activation recompute are what ran."""

from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from xtrain.pipeline_parallel import checkpoint
from xtrain_docs.lectures.lc5 import recompute

LIBRARY = "xtrain.pipeline_parallel.recompute:checkpoint"
LAYERS = 8


@pytest.mark.verifies(LIBRARY)
def test_for_transformer_layers_the_smallest_segments_need_least(on_ranks):
    """And both counts are those of the page's forms."""
    of_input, of_layer = recompute.kept_bytes(1, 1), recompute.kept_bytes(1, 0)
    assert recompute.kept_bytes(LAYERS, 0) == LAYERS * of_layer
    peaks = []
    for each in (1, 2, 4, 8):
        kept = LAYERS // each * of_input
        assert recompute.kept_bytes(LAYERS, each) == kept
        peaks.append(max(n for _, n in recompute.live_bytes(LAYERS, each)))
        form = kept + each * of_layer + of_input
        assert peaks[-1] == pytest.approx(form, rel=0.01)
    assert peaks == sorted(peaks)
    none = max(n for _, n in recompute.live_bytes(LAYERS, 0))
    assert none == pytest.approx(LAYERS * of_layer + of_input, rel=0.01)
    assert peaks[0] < none / 3


@pytest.mark.verifies(LIBRARY)
def test_recompute_adds_one_forward_to_three():
    """And torch's leaves out the last matmul of each layer's second forward."""
    found = []
    for again in (
        lambda function, x: function(x),
        checkpoint,
        partial(torch_checkpoint, use_reentrant=False),
    ):
        layers, x = recompute.layers_and_input(2)
        with FlopCounterMode(display=False) as counter:
            for segment in recompute.segments(layers, 1):
                x = again(segment, x)
            x.sum().backward()
        found.append(counter.get_total_flops())
    assert [3 * flops / found[0] for flops in found] == [3, 4, 3.75]


@pytest.mark.verifies(LIBRARY)
def test_the_picture_has_every_end_of_a_layers_run(on_ranks):
    drawing = recompute.recompute_memory(6)
    lines = [part.split('"')[1] for part in drawing.split("<polyline")[1:]]
    lines = [line.partition('"')[0].split() for line in lines]
    assert [len(line) for line in lines] == [12, 18, 18]
    assert "backward begins" in drawing


def test_runs_of_a_segment_lie_between_two_backwards():
    kinds = ["forward", "forward", "again", "again", "backward", "backward"]
    points = recompute.placed([(kind, 2**20) for kind in kinds])
    assert [round(at, 2) for at, _ in points] == [1, 2, 2.33, 2.67, 3, 4]
