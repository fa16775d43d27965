"""`recompute=` of the model: the same bits as without, and what each way keeps."""

from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F

from tests.model.twins import LOSSES, MIXTRAL, batch, config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, batch_group
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain.testing.live import LiveStorages
from xtrain.testing.saved import SavedTensors

MODEL = "xtrain.model.decoder:XtrainModel"
LAYERS = "xtrain.model.decoder_parts:DecoderParts"
WAYS = ("layer", "selective")
dropped = partial(F.scaled_dot_product_attention, dropout_p=0.4)
"""Attention whose probabilities are dropped: its masks are drawn anew each time."""


def trained(recompute, steps=3, **changes):
    """Loss and every gradient of each step, weights and random numbers afterwards."""
    config = config_of(**changes)
    options = {"attention": dropped, "dtype": torch.float64, "recompute": recompute}
    model, found = XtrainModel(config, **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*batch(step))
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
    return [*found, *model.parameters(), torch.rand(3)]


def same_bits(found, expected):
    assert len(found) == len(expected) > 10
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.verifies(MODEL, LAYERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, MIXTRAL | LOSSES])
def test_a_recomputed_model_trains_with_the_same_bits_and_the_same_masks(way, changes):
    same_bits(trained(way, **changes), trained("none", **changes))


def test_other_masks_in_the_second_run_would_be_seen(monkeypatch):
    forgets = partial(XtrainModel.through_layers.__globals__["checkpoint"],
                      preserve_rng_state=False)  # fmt: skip
    expected = trained("none", 1)
    monkeypatch.setitem(XtrainModel.through_layers.__globals__, "checkpoint", forgets)
    with pytest.raises(AssertionError):
        same_bits(trained("layer", 1), expected)


# ------------------------------------------------------------------------ what is kept


def kept(recompute, layers, attention=dropped):
    """Bytes that the forward of so many layers leaves for backward."""
    config = config_of(num_hidden_layers=layers)
    model = XtrainModel(config, attention=attention, recompute=recompute)
    with SavedTensors() as saved:
        loss = model.loss(*batch(0))
    del loss
    return saved.nbytes(but=model.parameters())


def kept_within(attention):
    """Bytes that attention alone keeps, and those of queries, keys and values."""
    found = []

    def observed(q, k, v, **options):
        with SavedTensors() as saved:
            out = attention(q, k, v, **options)
        # what comes out is the input of the output projection, too
        found.append((saved.nbytes(but=[out]), q.nbytes + k.nbytes + v.nbytes))
        return out

    XtrainModel(config_of(num_hidden_layers=1), attention=observed).loss(*batch(0))
    return found[0]


@pytest.mark.verifies(MODEL, LAYERS)
def test_a_layer_keeps_its_input_or_all_but_what_attention_makes():
    a_layer = {way: kept(way, 3) - kept(way, 2) for way in ("none", *WAYS)}
    config, (tokens, _) = config_of(), batch(0)
    assert a_layer["layer"] == tokens.numel() * config.hidden_size * 4
    made, taken = kept_within(dropped)  # scaled copies and no queries, keys, values
    assert a_layer["selective"] == a_layer["none"] - made + taken
    scores = config.num_attention_heads * tokens.numel() * tokens.shape[1] * 4
    assert made - taken > 2 * scores  # probabilities, before and after dropout


# ------------------------------------------------------------------------ in a pipeline

LAYOUTS = {
    "one_f_one_b": {"pipeline": 2, "tensor": 2},
    "interleaved": {"pipeline": 2, "data": 2},
    "zb_h1": {"pipeline": 2},
    "dualpipe": {"pipeline": 2, "data": 2},
}
ON_STAGES = (*WAYS, "stage")


def trained_stages(name, recompute, steps=2):
    """Gradients of this rank's stages after each step, and the loss."""
    sizes = LAYOUTS[name]
    mesh = init_mesh(tuple(sizes.values()), tuple(sizes))
    schedule = SCHEDULES[name](2, 4)
    config = config_of(num_hidden_layers=3)
    options = {"sequence_parallel": True} if "tensor" in sizes else {}
    if "tensor" not in sizes:
        options["attention"] = dropped
    stages = XtrainModel.stages(
        config, mesh, schedule, dtype=torch.float64, recompute=recompute, **options
    )
    modules = [stage.module for stage in stages]
    last = next((m for m in modules if m.has_head), modules[0])
    runner = PipelineRunner(
        stages, schedule, last.loss_fn, mesh["pipeline"].get_group(),
        data_group=batch_group(mesh),
    )  # fmt: skip
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.03)
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        found.append(runner.step(*batch(step, 8)))
        for module in modules:
            module.sync_gradients()
        found += [p.grad for p in parameters]
        optimizer.step()
    return [*found, torch.rand(3)]


def compare_stages(name) -> None:
    expected = trained_stages(name, "none")
    for way in ON_STAGES:
        same_bits(trained_stages(name, way), expected)


@pytest.mark.verifies(
    MODEL, LAYERS, "xtrain.model.stages:make_modules", "xtrain.model.stages:as_stages"
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_recomputed_stages_train_with_the_same_bits(world, name):
    world(prod(LAYOUTS[name].values())).run(compare_stages, name)


def stage_memory(recompute) -> tuple[int, int]:
    """Bytes that a stage keeps for a micro-batch, and the most alive in a step."""
    mesh, schedule = init_mesh((1,), ("pipeline",)), SCHEDULES["gpipe"](1, 2)
    config = config_of(num_hidden_layers=8)
    (stage,) = XtrainModel.stages(
        config, mesh, schedule, recompute=recompute, attention=dropped
    )
    with SavedTensors() as saved:
        stage(batch(0)[0])
    runner = PipelineRunner(stage, schedule, stage.module.loss_fn, mesh.get_group())
    live, most = LiveStorages(), []
    for layer in stage.module.layers:
        layer.register_full_backward_hook(
            lambda *_: most.append(live.nbytes(stage.parameters()))
        )
    with live:
        runner.step(*batch(0, 4))
    return saved.nbytes(but=stage.parameters()), max(most)


@pytest.mark.verifies(MODEL, LAYERS)
def test_layers_need_least_in_backward_and_a_whole_stage_keeps_least(world):
    (found,) = world(1).run(memory_by_way)
    kept_by, most = zip(*found.values(), strict=True)
    assert sorted(kept_by) == [kept_by[i] for i in (3, 2, 1, 0)]  # stage keeps least
    assert most[2] == min(most)  # layers: one layer at a time comes back
    assert most[3] > 2 * most[2]  # a stage: all its layers come back at once


def memory_by_way():
    return {way: stage_memory(way) for way in ("none", "selective", "layer", "stage")}


def refusals() -> None:
    for way, rule in (("full", "is not one of"), ("stage", "XtrainModel.stages knows")):
        with pytest.raises(ValueError, match=rule):
            XtrainModel(config_of(), recompute=way)
    for way, some in (("none", 1), ("selective", 1), ("layer", -1), ("layer", 1.0)):
        with pytest.raises(ValueError, match=f"recomputed_layers={some} with recompu"):
            XtrainModel(config_of(), recompute=way, recomputed_layers=some)
    mesh = init_mesh((2,), ("pipeline",))
    rank = mesh.get_local_rank()
    given = {"recompute": "layer", "recomputed_layers": rank}
    with pytest.raises(ValueError, match="recomputed_layers"):
        XtrainModel(config_of(), init_mesh((2,), ("data",)), **given)
    way, schedule = "all" if rank else "layer", SCHEDULES["gpipe"](2, 2)
    with pytest.raises(ValueError, match="recompute='all' is not one of.*stage"):
        XtrainModel.stages(config_of(), mesh, schedule, recompute=way)
    with pytest.raises(ValueError, match="recompute"):
        XtrainModel(config_of(), init_mesh((2,), ("data",)), recompute=WAYS[rank])


def kept_of_layers() -> list[int]:
    """Bytes that 8 layers keep, of which 8, 5, 2 and none are recomputed whole."""
    found = []
    for some in (8, 5, 2, 0):
        options = {"recompute": "layer", "recomputed_layers": some}
        model = XtrainModel(config_of(num_hidden_layers=8), **options)
        with SavedTensors() as saved:
            model.loss(*batch(0))
        found.append(saved.nbytes(but=model.parameters()))
    return found


@pytest.mark.verifies(MODEL, LAYERS)
def test_each_layer_that_is_recomputed_whole_keeps_less(world):
    (kept,) = world(1).run(kept_of_layers)
    assert kept[0] < kept[1] < kept[2] < kept[3]


@pytest.mark.verifies("xtrain.model.checks:check_recompute")
def test_unknown_and_different_ways_are_refused_on_every_rank(world):
    world(2).run(refusals)
