"""Stages of the decoder on context ranks under the runner, against one process."""

import pytest
import torch
from torch.nn.functional import pad

from tests.model.stage_training import Layout, StageTraining, check_training
from tests.model.twins import LENGTH, close, config_of, sparse_batch
from xtrain.model import XtrainModel

VERIFIED = (
    "xtrain.model.stages:DecoderStage",
    "xtrain.model.stage_gradients:clip_stages_grad_norm_",
    "xtrain.model.context:SequenceCut",
    "xtrain.model.gradient_sums:sum_gradients",
    "xtrain.pipeline_parallel.runner:PipelineRunner",
)
UNTIED = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = UNTIED | {"tie_word_embeddings": True}


def uneven_rows(step: int, rank: int, ranks: int):
    """9 rows of rank 0, 11 of rank 1."""
    rows = [9 + 2 * r for r in range(ranks)]
    tokens, labels = sparse_batch(step, rows=sum(rows))
    return tokens.split(rows)[rank], labels.split(rows)[rank]


def check(world, layout, changes, **options):
    layout = layout._replace(context=2)
    options["sequence_parallel"] = layout.tensor > 1
    check_training(world, [(layout, options)], changes, 2, rows_of=uneven_rows)


@pytest.mark.verifies(*VERIFIED)
def test_pipeline_and_context_ranks_train_as_one_process(world):
    """In every kind of schedule, with each attention; tied and mirrored, too."""
    for schedule, attention, changes in (
        ("one_f_one_b", "ring", TIED),
        ("interleaved", "ulysses", UNTIED),
        ("zb_h1", "all_gather", UNTIED),
        ("zb_v", "ring", TIED),
        ("dualpipe", "ring", TIED),
    ):
        check(world, Layout(schedule, 2), changes, context_attention=attention)


@pytest.mark.verifies(*VERIFIED, "xtrain.model.stage_gradients:of_zero")
def test_pipeline_data_and_context_ranks_train_as_one_process(world):
    """Under a wrapper over data; one ZeRO optimizer has the stages of a rank."""
    check(world, Layout("one_f_one_b", 2, 2), TIED, wrapper="ddp")
    check(world, Layout("zb_v", 2, 2), TIED, wrapper="zero 2")
    check(world, Layout("interleaved", 2, 2), UNTIED, wrapper="fsdp")


@pytest.mark.verifies(*VERIFIED)
def test_pipeline_context_and_tensor_ranks_train_as_one_process(world):
    check(world, Layout("one_f_one_b", 2, 1, 2), TIED)


def wrong_batches() -> list[str]:
    """A length that zigzag cannot cut, labels of another length; then a good step."""
    run, said = StageTraining(Layout("one_f_one_b", 2, context=2), UNTIED), []
    tokens, labels = uneven_rows(0, 0, 1)
    for wrong in ((tokens[:, 2:], labels[:, 2:]), (tokens, pad(labels, (0, 4)))):
        with pytest.raises(ValueError, match="sequence|labels") as caught:
            run.runner.step(*wrong)
        said.append(str(caught.value))
    loss = run.runner.step(tokens, labels)
    right = XtrainModel(config_of(**UNTIED), dtype=torch.float64).loss(tokens, labels)
    close(loss, right.detach())
    return said


@pytest.mark.verifies(*VERIFIED)
def test_what_stages_cannot_cut_is_said_on_all_ranks(world):
    for length, labels in world(4).run(wrong_batches):
        assert f"a sequence of {LENGTH - 2} cannot be cut into 4 equal parts" in length
        assert f"labels [3, {LENGTH + 4}] for logits [3, {LENGTH // 2}, 24]" in labels
