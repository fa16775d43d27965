"""Every schedule in real ranks, against one process."""

import pytest

from tests.pipeline_parallel.pipelines import make, run_step
from xtrain.schedules import simulate

SIZES = [
    ("gpipe", 1, 3), ("gpipe", 2, 1), ("gpipe", 3, 5), ("gpipe", 4, 4),
    ("one_f_one_b", 1, 2), ("one_f_one_b", 2, 5), ("one_f_one_b", 3, 2),
    ("one_f_one_b", 4, 8), ("interleaved", 2, 4), ("interleaved", 3, 3),
    ("interleaved", 4, 8), ("zb_h1", 2, 3), ("zb_h1", 4, 8), ("zb_h2", 3, 7),
    ("zb_v", 2, 5), ("zb_v", 4, 8), ("chimera", 2, 2), ("chimera", 4, 4),
    ("dualpipe_simple", 2, 4), ("dualpipe_simple", 4, 8), ("dualpipe", 2, 4),
    ("dualpipe", 4, 10), ("dualpipe_v", 2, 5), ("dualpipe_v", 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SIZES)
def test_a_schedule_gives_the_loss_and_gradients_of_one_process(
    world, name, ranks, micro_batches
):
    rows = 2 * micro_batches + 1  # not as many in each micro-batch
    schedule = make(name, ranks, micro_batches)
    peaks = simulate(schedule).peak_activations
    results = world(ranks).run(run_step, name, ranks, micro_batches, rows)
    for rank, result in enumerate(results):
        assert max(result["losses"]) < 1e-12
        assert result["gradients"] < 1e-12
        assert result["evaluated"] < 1e-12
        assert result["order"]
        assert result["peak"] == peaks[rank]
