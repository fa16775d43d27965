"""Stages of a decoder with experts, each over expert ranks, against one process."""

import pytest
import torch

from tests.model.expert_cases import DEEPSEEK, LOSSES, MIXTRAL
from tests.model.stage_training import Layout, StageTraining, one_process
from tests.model.test_on_a_mesh import close, config_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.model import XtrainModel
from xtrain.model.stages import part_costs, stage_parts
from xtrain.schedules import gpipe

STAGES = "xtrain.model.stages:DecoderStage"
BIASES = "xtrain.model.stage_gradients:update_stages_balance_biases"
CLIP = "xtrain.model.stage_gradients:clip_stages_grad_norm_"
DEEP, LIMIT = {"num_hidden_layers": 4}, 0.3
KINDS = {"mixtral": MIXTRAL | DEEP, "deepseek": DEEPSEEK | DEEP}


def trained(cases) -> None:
    """Three clipped steps of each case: losses, norms, weights and biases."""
    for kind, layout, recompute in cases:
        changes = KINDS[kind]
        whole, right = one_process(changes, 3, max_norm=LIMIT)
        run = StageTraining(layout, changes)
        for stage in run.stages:
            stage.recompute = recompute
        found = run.train(0, 3, max_norm=LIMIT)
        for step, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            both = torch.tensor(mine), torch.tensor(theirs)
            close(*both, f"{layout} step {step}")
        run.check({n: p.detach() for n, p in whole.named_parameters()}, layout)
        biases = dict(whole.named_buffers())
        assert bool(biases) == (kind == "deepseek")
        for module in run.modules:
            for name, buffer in module.named_buffers():
                assert buffer.any(), "no bias has moved"
                close(buffer, biases[name], f"{layout} {name}")


@pytest.mark.verifies(STAGES, BIASES, CLIP)
def test_stages_of_experts_train_as_one_process(world):
    """A split backward, a mirrored schedule, recompute: each token counts once."""
    world(4).run(
        trained,
        [
            ("mixtral", Layout("one_f_one_b", 2, expert=2), False),
            ("deepseek", Layout("dualpipe", 2, expert=2), False),
            ("deepseek", Layout("zb_v", 2, expert=2), False),
            ("deepseek", Layout("interleaved", 2, expert=2), True),
        ],
    )


@pytest.mark.verifies(STAGES, BIASES, CLIP)
def test_with_expert_data_and_tensor_ranks_besides(world):
    world(8).run(
        trained,
        [
            ("mixtral", Layout("one_f_one_b", 2, 2, 1, 2, micro_batches=2), False),
            ("deepseek", Layout("zb_h1", 2, tensor=2, expert=2), False),
        ],
    )


def trained_wrapped(cases) -> None:
    """Three clipped AdamW steps; each wrapper takes its ranks from the mesh."""
    changes = KINDS["mixtral"]
    whole, right = one_process(changes, 3, max_norm=LIMIT)
    weights = {n: p.detach() for n, p in whole.named_parameters()}
    for wrapper, layout in cases:
        run = StageTraining(layout, changes, wrapper=wrapper)
        found = run.train(0, 3, max_norm=LIMIT)
        for step, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            both = torch.tensor(mine), torch.tensor(theirs)
            close(*both, f"{wrapper} {layout} step {step}")
        check = run.check_wrapped if wrapper == "fsdp" else run.check
        check(weights, f"{wrapper} {layout}")


@pytest.mark.verifies(STAGES, CLIP, "xtrain.pipeline_parallel.wrappers:check_reduction")
def test_a_wrapper_over_expert_data_trains_stages_of_experts(world):
    """Dense gradients are left to sum over "expert", after the step."""
    wrappers = ("ddp", "zero 1", "zero 2", "fsdp")
    cases = [
        (wrapper, Layout(schedule, 2, 2, 1, 2, micro_batches=2))
        for wrapper, schedule in zip(
            wrappers, ("one_f_one_b", "zb_h1", "one_f_one_b", "zb_h1"), strict=True
        )
    ]
    world(8).run(trained_wrapped, cases)


@pytest.mark.verifies(STAGES, CLIP, "xtrain.pipeline_parallel.wrappers:check_reduction")
def test_and_where_no_other_rank_holds_the_same_experts(world):
    """A wrapper has nothing to sum, mirrored stages and split backwards included."""
    cases = [
        ("ddp", Layout("one_f_one_b", 2, expert=2)),
        ("zero 1", Layout("dualpipe", 2, expert=2)),
        ("zero 2", Layout("zb_h1", 2, expert=2)),
    ]
    world(4).run(trained_wrapped, cases)


def saved_and_loaded(directory) -> None:
    """Saved whole by nobody: stages write, a cut model reads, and the other way."""
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


@pytest.mark.verifies("xtrain.model.stages:check_no_auxiliary_loss")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_all_layers_together_is_refused_in_stages(name):
    config = config_of(**MIXTRAL, **{name: 0.5})
    with pytest.raises(ValueError, match=f"{name}=0.5: stages have some of the layers"):
        XtrainModel.stages(config, None, gpipe(1, 1))
