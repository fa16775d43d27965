"""What tensor ranks have parts of is summed once a step, and once only."""

import pytest

from tests.model.stage_training import Layout, StageTraining, even_rows
from tests.model.twins import close, config_of
from xtrain.cluster.per_rank import replaced
from xtrain.model import XtrainModel, decoder_weights

CHANGES = {"num_hidden_layers": 3, "num_key_value_heads": 1}


def accumulated(sums: bool) -> int:
    """Two steps without an update; `sync_gradients` of every stage after each."""
    calls, right = [], decoder_weights.sum_in_one_bucket

    def counted(parameters, ranks, group) -> None:
        calls.append(len(parameters))
        if sums:
            right(parameters, ranks, group)

    layout = Layout("interleaved", 2, tensor=2)
    with replaced(decoder_weights, "sum_in_one_bucket", counted):
        run = StageTraining(layout, CHANGES, sequence_parallel=True)
        for step in range(2):
            run.accumulate(step)
    whole = XtrainModel(config_of(**CHANGES)).double()
    for step in range(2):
        whole.loss(*even_rows(step, 0, 1)).backward()
    for module, name, parameter in run.named_parameters():
        wanted = module.placement(name).of(whole.get_parameter(name).grad)
        close(parameter.grad, wanted, name)
    held = [n for _, n, _ in run.named_parameters()]
    parts = [n for n in held if any(word in n for word in ("norm", "k_proj", "v_proj"))]
    assert sum(calls) == 2 * len(parts)
    return len(calls) - 2 * sum(m.tensor is not None for m in run.modules)


@pytest.mark.verifies(
    "xtrain.model.gradient_sums:sum_in_one_bucket",
    "xtrain.model.parameters:partial_ranks",
    "xtrain.model.decoder_weights:DecoderWeights",
    "xtrain.pipeline_parallel.gradients:Reductions",
)
def test_the_runner_sums_them_once_a_step_and_sync_gradients_not_again(world):
    assert max(world(4).run(accumulated, True)) <= 0  # a bucket a stage, or none


def test_a_bucket_that_is_not_summed_would_be_seen(world):
    with pytest.raises(AssertionError, match="norm|_proj"):
        world(4).run(accumulated, False)
