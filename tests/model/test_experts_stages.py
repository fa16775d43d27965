"""Stages of a decoder with experts, each over expert ranks, against one process."""

import pytest
import torch

from tests.model.stage_training import (
    Layout,
    StageTraining,
    check_training,
    one_process,
    padded_rows,
)
from tests.model.twins import DEEPSEEK, LOSSES, MIXTRAL, close, config_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.model import XtrainModel
from xtrain.model.stages import part_costs, stage_parts

STAGES = "xtrain.model.stages:DecoderStage"
BIASES = "xtrain.model.stage_gradients:update_stages_balance_biases"
CLIP = "xtrain.model.stage_gradients:clip_stages_grad_norm_"
TERMS = [
    f"xtrain.model.balance:{name}"
    for name in ("auxiliary_terms", "loss_of_terms", "sequence_loss")
]
NONE = pytest.mark.verifies("xtrain.model.balance:no_terms")  # a stage of dense layers
DEEP = {"num_hidden_layers": 4}
KINDS = {"mixtral": MIXTRAL | DEEP, "deepseek": DEEPSEEK | DEEP}


def check(world, kind, runs) -> None:
    check_training(world, runs, KINDS[kind], digits=1e-10)


@pytest.mark.verifies(STAGES, BIASES, CLIP)
def test_stages_of_experts_train_as_one_process(world):
    """A split backward, a mirrored schedule, recompute: each token counts once."""
    check(world, "mixtral", [(Layout("one_f_one_b", 2, expert=2), {})])
    runs = [(Layout(schedule, 2, expert=2), {}) for schedule in ("dualpipe", "zb_v")]
    runs.append((Layout("interleaved", 2, expert=2), {"recompute": "stage"}))
    runs.append((Layout("dualpipe", 2, expert=2), {"once_a_rank": True}))
    check(world, "deepseek", runs)


@pytest.mark.verifies(STAGES, BIASES, CLIP)
def test_with_expert_data_and_tensor_ranks_besides(world):
    check(world, "mixtral", [(Layout("one_f_one_b", 2, 2, 1, 2, 2), {})])
    check(world, "deepseek", [(Layout("zb_h1", 2, tensor=2, expert=2), {})])


@pytest.mark.verifies(STAGES, CLIP, "xtrain.pipeline_parallel.wrappers:check_reduction")
def test_a_wrapper_over_expert_data_trains_stages_of_experts(world):
    """Dense gradients are left to sum over "expert", after the step."""
    runs = [
        (Layout(schedule, 2, 2, 1, 2, 2), {"wrapper": wrapper})
        for wrapper, schedule in (
            ("ddp", "one_f_one_b"),
            ("zero 1", "zb_h1"),
            ("zero 2", "one_f_one_b"),
            ("fsdp", "zb_h1"),
        )
    ]
    check(world, "mixtral", runs)


@pytest.mark.verifies(STAGES, CLIP, "xtrain.pipeline_parallel.wrappers:check_reduction")
def test_and_where_no_other_rank_holds_the_same_experts(world):
    """A wrapper has nothing to sum, mirrored stages and split backwards included."""
    runs = [
        (Layout("one_f_one_b", 2, expert=2), {"wrapper": "ddp"}),
        (Layout("dualpipe", 2, expert=2), {"wrapper": "zero 1"}),
        (Layout("zb_h1", 2, expert=2), {"wrapper": "zero 2"}),
    ]
    check(world, "mixtral", runs)


def saved_and_loaded(directory) -> None:
    """Stages write, and the whole model reads."""
    run = StageTraining(Layout("one_f_one_b", 2, expert=2), KINDS["deepseek"])
    run.train(0, 2)
    save_checkpoint(directory, 2, run.shards())
    whole, _ = one_process(KINDS["deepseek"], 2)
    config = config_of(**KINDS["deepseek"] | {"seed": 5})
    again = XtrainModel(config, dtype=torch.float64)
    load_checkpoint(directory, again.shards())
    for name, tensor in whole.state_dict().items():
        close(again.state_dict()[name], tensor, name)


@pytest.mark.verifies(STAGES, "xtrain.model.decoder_parts:DecoderParts")
def test_what_stages_of_experts_save_a_whole_model_loads(world, tmp_path):
    world(4).run(saved_and_loaded, str(tmp_path))


@pytest.mark.verifies("xtrain.model.stages:part_costs")
def test_a_layer_with_experts_costs_what_a_token_meets():
    config = config_of(**DEEPSEEK | {"num_hidden_layers": 3})
    dense = config_of(intermediate_size=8, num_hidden_layers=1)
    embedding, first, *others, head = part_costs(config, 10)
    assert (embedding, first) == (0, part_costs(dense, 10)[1])
    inner = 3 * (3 + 2) * config.moe_intermediate_size + 8  # chosen, shared, router
    more = 6 * config.hidden_size * (inner - 3 * 8) * 10
    assert others == [first + more] * 2
    assert sum((embedding, first, *others, head)) == 10 * config.flops_per_token(
        10, causal=True
    )
    assert [list(span) for span in stage_parts(config, 2)] == [[0, 1, 2], [3, 4]]


# -- auxiliary losses: those of each micro-batch, on the ranks of all data

EVERY = LOSSES | {"router_sequence_loss_coef": 0.3}
POOLED = EVERY | {"router_aux_loss_pooled": True}
AUXILIARY = {  # by ranks: (config, layouts), 4 micro-batches a step
    1: [(EVERY, [(Layout("interleaved", 1, micro_batches=4), {})])],
    2: [
        (POOLED, [(Layout("one_f_one_b", 2), {}), (Layout("zb_v", 2), {})]),
        (EVERY, [(Layout("zb_h1", 2), {"recompute": "layer"})]),
    ],
    3: [(EVERY, [(Layout("one_f_one_b", 3, micro_batches=4), {})])],
    4: [
        (EVERY, [(Layout("dualpipe", 2, tensor=0, expert=2), {})]),
        (POOLED, [(Layout("dualpipe", 2, expert=2), {})]),
        (EVERY, [(Layout("zb_h1", 2, data=2), {"wrapper": "fsdp"})]),
        (POOLED, [(Layout("one_f_one_b", 2, context=2), {})]),
    ],
    8: [
        (EVERY, [(Layout("one_f_one_b", 4, expert=2, micro_batches=4), {})]),
        (
            EVERY,
            [
                (
                    Layout("one_f_one_b", 2, tensor=2, context=2),
                    {"sequence_parallel": True},
                )
            ],
        ),
    ],
}


@pytest.mark.verifies(STAGES, *TERMS)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=NONE), 3, 4, 8])
def test_auxiliary_losses_of_stages_are_those_of_one_process(world, size):
    """Of each layer or pooled; each micro-batch weighs as its labels do."""
    for changes, runs in AUXILIARY[size]:
        config = KINDS["deepseek"] | {"num_hidden_layers": 5} | changes
        more = {"steps": 2, "digits": 1e-10, "micro_batches": 4}
        check_training(world, runs, config, **more)


@pytest.mark.verifies(STAGES, "xtrain.expert_parallel.overlap_chunks:ForwardChunks")
def test_padding_reaches_the_routers_of_every_stage(world):
    """With positions of its own; also where a pair runs a layer in chunks."""
    config = KINDS["deepseek"] | EVERY
    for layout, options in (
        (Layout("dualpipe", 2, tensor=0, expert=2), {}),
        (Layout("zb_h1", 2, tensor=2), {"sequence_parallel": True}),
        (Layout("one_f_one_b", 2, context=2), {"recompute": "layer"}),
        (Layout("dualpipe_v", 2, context=2), {"context_balance": "documents"}),
    ):
        more = {"steps": 3, "digits": 1e-10, "micro_batches": 4}
        more["rows_of"] = padded_rows
        check_training(world, [(layout, options)], config, **more)
