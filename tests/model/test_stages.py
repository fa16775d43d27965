"""The decoder cut into stages: what each rank holds, and that together they train."""

import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from tests.devices import on_cpu
from tests.model.stage_training import Layout, check_training
from tests.model.test_hf import memory_of_its_own
from tests.model.twins import batch, close, config_of
from xtrain.cluster.per_rank import replaced
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, clip_stages_grad_norm_, decoder_weights
from xtrain.model.stages import part_costs, stage_parts
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import SCHEDULES, gpipe, one_f_one_b

STAGES = (
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
    "xtrain.model.stages:DecoderStage",
    "xtrain.model.stages:make_modules",
    "xtrain.model.stages:as_stages",
)
CLIP = "xtrain.model.stage_gradients:clip_stages_grad_norm_"
DEEP = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = DEEP | {"tie_word_embeddings": True}


ON_RANKS = {
    1: [Layout("gpipe", 1), Layout("interleaved", 1)],
    2: [Layout("gpipe", 2), Layout("zb_v", 2), Layout("dualpipe", 2)],
    3: [Layout("interleaved", 3, micro_batches=4), Layout("dualpipe_v", 3)],
    4: [Layout("one_f_one_b", 4), Layout("zb_v", 4), Layout("chimera", 4)],
}


@pytest.mark.verifies(*STAGES, CLIP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_stages_train_as_the_whole_model(world, size):
    for changes in (DEEP, TIED):
        check_training(world, [(layout, {}) for layout in ON_RANKS[size]], changes)


@pytest.mark.verifies(*STAGES, CLIP)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stages_on_tensor_and_data_ranks_train_as_the_whole_model(
    world, sequence_parallel
):
    layouts = [
        Layout("interleaved", 2, 1, 2),
        Layout("dualpipe", 2, 2, 1),
        Layout("zb_v", 2, 2, 1),
        Layout("chimera", 2, 1, 2),
    ]
    options = {"sequence_parallel": sequence_parallel}
    check_training(world, [(layout, options) for layout in layouts], TIED)


# -- what a rank holds


def held(names, changes):
    """By schedule and stage of this rank: its parameters' elements, what it shares."""
    mesh, found = init_mesh((dist.get_world_size(),), ("pipeline",)), {}
    ranks, rank = mesh.size(), mesh.get_local_rank()
    for name in names:
        schedule = SCHEDULES[name](ranks, 2 * ranks)
        stages = XtrainModel.stages(config_of(**changes), mesh, schedule)
        assert [stage.index for stage in stages] == [*schedule.stages_of(rank)]
        assert all(stage.count == schedule.stages for stage in stages)
        found[name] = {}
        for stage in stages:
            own = dict(stage.module.named_parameters())
            assert all(own[name] is shared for name, shared in stage.shared.items())
            sizes = {name: parameter.numel() for name, parameter in own.items()}
            found[name][stage.index] = sizes, list(stage.shared)
    return found


def places(found, name, ranks, changes):
    """Each parameter with the stages and ranks that hold it, all its elements each."""
    whole = XtrainModel(config_of(**changes))
    full = {name: p.numel() for name, p in whole.named_parameters()}
    last = SCHEDULES[name](ranks, 2 * ranks).stages - 1
    holders = {}
    for rank, of_rank in enumerate(found):
        for stage, (sizes, shared) in of_rank[name].items():
            for parameter, numel in sizes.items():
                assert numel == full[parameter]
                holders.setdefault(parameter, []).append((stage, rank))
            tied = whole.config.tie_word_embeddings and stage in (0, last)
            assert shared == (["embed_tokens.weight"] if tied else [])
    assert holders.keys() == full.keys()
    return holders


@pytest.mark.verifies(*STAGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_together_the_ranks_hold_the_whole_model_once_or_mirrored_twice(world, ranks):
    found = world(ranks).run(held, list(SCHEDULES), DEEP)
    whole = sum(p.numel() for p in XtrainModel(config_of(**DEEP)).parameters())
    for name in SCHEDULES:
        copies = SCHEDULES[name](ranks, 2 * ranks).parameter_copies
        assert copies == (2 if name in MIRRORED else 1)
        for held_by in places(found, name, ranks, DEEP).values():
            (stage, rank), *others = held_by
            assert others == [(stage, ranks - 1 - rank)] * (copies - 1)
        sizes = [
            sum(sum(sizes.values()) for sizes, _ in of_rank[name].values())
            for of_rank in found
        ]
        assert sum(sizes) == copies * whole
        assert max(sizes) < 1.7 * copies * whole / ranks


MIRRORED = "chimera", "dualpipe_simple", "dualpipe"


@pytest.mark.verifies(*STAGES)
def test_a_tied_weight_is_held_by_both_ends_and_nothing_else_is(world):
    names = ["one_f_one_b", "zb_v", "dualpipe"]
    found = world(2).run(held, names, TIED)
    for name in names:
        schedule = SCHEDULES[name](2, 4)
        for parameter, held_by in places(found, name, 2, TIED).items():
            tied = parameter == "embed_tokens.weight"
            assert len(held_by) == schedule.parameter_copies * (2 if tied else 1)
            if tied:
                assert {stage for stage, _ in held_by} == {0, schedule.stages - 1}


def grows_by_its_stage():
    """The most that this process has grown while it made its stage, and its size."""
    mesh = init_mesh((4,), ("pipeline",))
    config = config_of(**WIDE)
    seen, full_weight = [], decoder_weights.full_weight

    def watching(*args):
        found = full_weight(*args)
        seen.append(memory_of_its_own())
        return found

    before = memory_of_its_own()
    with replaced(decoder_weights, "full_weight", watching):
        (stage,) = XtrainModel.stages(config, mesh, gpipe(4, 4))
    most = max(*seen, memory_of_its_own()) - before
    return most, sum(p.nbytes for p in stage.parameters())


WIDE = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 4096,
        "num_hidden_layers": 8}  # fmt: skip


@pytest.mark.verifies(*STAGES)
def test_no_rank_allocates_more_than_its_own_stage(world):
    if sys.platform != "linux" or world(4).device != "cpu":
        pytest.skip("needs Linux to tell how much memory a process has of its own")
    model = XtrainModel(config_of(**WIDE), device="meta")
    whole = sum(p.nbytes for p in model.parameters())
    world(4).run(grows_by_its_stage)  # warm: imports, meta shapes
    for grown, stage in world(4).run(grows_by_its_stage):
        assert 0.24 * whole < stage < 0.26 * whole
        assert grown < stage + 0.3 * whole  # a weight is drawn whole, and then copied


# -- where it is cut


def costs_of_head(config):
    _, layer, *_, head = part_costs(config)
    return head / layer


@pytest.mark.verifies(
    "xtrain.model.stages:part_costs",
    "xtrain.model.stages:stage_parts",
    "xtrain.model.stages:make_modules",
)
def test_stages_cost_the_same_flops_and_the_head_counts_as_layers():
    config = config_of(num_hidden_layers=8, vocab_size=500, hidden_size=20)
    for sequence in (1, 64):
        costs = part_costs(config, sequence)
        total = config.flops_per_token(sequence, causal=True) * sequence
        assert sum(costs) == total and costs[0] == 0 and len(costs) == 10
        assert costs[-1] == 6 * 500 * 20 * sequence
    assert part_costs(config, 64)[1] > 64 * part_costs(config, 1)[1]
    spans = stage_parts(config, 4)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert 2 < costs_of_head(config) < 3, "in layers"
    assert [len(span) for span in spans] == [3, 3, 3, 1]  # the embedding is free
    # A longer sequence makes layers dearer, so that one more goes to the head's stage.
    assert len(stage_parts(config, 2, 4096)[-1]) > len(stage_parts(config, 2)[-1])
    schedule = SCHEDULES["interleaved"](1, 2, 2)
    for sequence in (1, 4096):
        made = XtrainModel.stages(config, None, schedule, sequence=sequence)
        held = [stage.module.parts for stage in made]
        assert held == stage_parts(config, 2, sequence)


def too_many():
    mesh, config = init_mesh((2,), ("pipeline",)), config_of(num_hidden_layers=2)
    (stage,) = XtrainModel.stages(config, mesh, one_f_one_b(2, 2))
    assert len(list(stage.module.layers)) == 1
    alone = XtrainModel.stages(config, mesh, SCHEDULES["interleaved"](2, 2))
    names = [{n.split(".")[0] for n, _ in s.module.named_parameters()} for s in alone]
    rule = "6 virtual stages of 2 layers: .*at most 4"
    with pytest.raises(ValueError, match=rule):
        XtrainModel.stages(config, mesh, SCHEDULES["interleaved"](2, 2, 3))
    with pytest.raises(ValueError, match='gpipe is for 3 ranks, .*"pipeline" has 2'):
        XtrainModel.stages(config, mesh, gpipe(3, 3))
    with pytest.raises(ValueError, match='gpipe is for 2 ranks, .*"pipeline" has 1'):
        XtrainModel.stages(config, init_mesh((2,), ("data",)), gpipe(2, 2))
    with pytest.raises(ValueError, match="'pipeline' has size 2.*XtrainModel.stages"):
        XtrainModel(config, mesh)
    with pytest.raises(ValueError, match="'expert' has size 2"):
        XtrainModel.stages(config, init_mesh((2,), ("expert",)), gpipe(1, 1))
    tied = config_of(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="shares embed_tokens.weight, .*to_empty"):
        XtrainModel.stages(tied, mesh, gpipe(2, 2), device="meta")
    return names


@pytest.mark.verifies(*STAGES, "xtrain.model.stages:check_pipeline")
def test_a_stage_may_be_the_embedding_or_the_head_alone_and_more_are_refused(world):
    first, second = world(2).run(too_many)
    assert first == [{"embed_tokens"}, {"layers"}]
    assert second == [{"layers"}, {"norm", "lm_head"}]


# -- what a stage computes


def stage_by_stage(sequence_parallel):
    """Each stage's output is the whole model's activation at that place."""
    mesh = init_mesh((1, dist.get_world_size()), ("pipeline", "tensor"))
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    config = config_of(**TIED)
    whole, inner = XtrainModel(config, dtype=torch.float64), []
    for layer in whole.layers:
        layer.register_forward_hook(lambda *args: inner.append(args[2].detach()))
    tokens, labels = batch(1)
    positions = torch.arange(12).expand(2, 12) * 3
    stages = XtrainModel.stages(
        config, mesh, SCHEDULES["interleaved"](1, 1, 4), **options
    )
    ends = [stage.module.parts.stop - 2 for stage in stages[:-1]]
    assert all(0 <= a < b for a, b in pairwise(ends))
    for more in ((), (positions,)):
        inner.clear()
        logits = whole(tokens, positions=positions if more else None)
        given = (tokens, *more)
        for stage, layer in zip(stages[:-1], ends, strict=True):
            output = stage.module(*given)
            given = output if more else (output,)
            assert len(given) == 1 + len(more)
            x = given[0]
            right = inner[layer]
            if sequence_parallel:
                right = right.chunk(dist.get_world_size(), 1)[dist.get_rank()]
            close(x, right, f"after layer {layer}")
        found = stages[-1].module(*given)
        close(found, logits.chunk(dist.get_world_size(), -1)[dist.get_rank()])
        total, count = stages[-1].module.loss_fn(found, labels)
        mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert count == (labels != -100).sum() < labels.numel()
        close(total / count, mean)


@pytest.mark.verifies(*STAGES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_stage_gives_the_activation_of_the_whole_model(world, sequence_parallel):
    world(2).run(stage_by_stage, sequence_parallel)


@pytest.mark.verifies(STAGES[2], CLIP)
def test_bad_input_of_a_stage_is_refused(world):
    world(1).run(bad_input)


def bad_input():
    mesh = init_mesh((1,), ("pipeline",))
    first, last = XtrainModel.stages(config_of(), mesh, SCHEDULES["interleaved"](1, 1))
    tokens, labels = batch(0)
    if on_cpu():
        with pytest.raises(ValueError, match=r"ids .24, 24, 24. are outside the voc"):
            first.module(torch.full_like(tokens, 24))
    with pytest.raises(ValueError, match="positions of shape"):
        first.module(tokens, torch.arange(11))
    with pytest.raises(ValueError, match=r"input \[2, 12, 8\], expected \[..., 7\]"):
        last.module(torch.zeros(2, 12, 8))
    logits = last.module(first.module(tokens))
    with pytest.raises(ValueError, match=r"labels \[2, 11\] for logits \[2, 12, 24\]"):
        last.module.loss_fn(logits, labels[:, 1:])
    if on_cpu():
        with pytest.raises(ValueError, match=r"ids .-7, .* outside the vocabulary"):
            last.module.loss_fn(logits, labels.clamp(max=-7))
    total, count = last.module.loss_fn(logits, torch.full_like(labels, -100))
    assert total == count == 0
    other = PipelineStage(torch.nn.Linear(2, 2), 0, 1)
    with pytest.raises(ValueError, match="stage 0 is a Linear: give the stages that"):
        clip_stages_grad_norm_([other], 1.0)
