"""Dry runs: one rank of each class against all ranks, real tensors, and the planner."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from xtrain.cli import main
from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.plan import Layout
from xtrain.train import dry_run as module
from xtrain.train import wrapped_model
from xtrain.train.batches import Batch
from xtrain.train.dry_run import DryRun, Hangs, bytes_sent, dry_run
from xtrain.train.dry_run_table import planned
from xtrain.train.optimizers import make_optimizer
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.recipes import dense_bytes, tiny_experts
from xtrain.train.steps import accumulate, train_step

RUN = "xtrain.train.dry_run:dry_run"
SHORT = 12  # tokens a context rank and more


def recipe_of(layout: Layout, experts: bool = False, dtype: str = "float32") -> Recipe:
    recipe = tiny_experts() if experts else dense_bytes()
    batch = 2 * layout.data * layout.micro_batches
    return replace(recipe, layout=layout, global_batch=batch, dtype=dtype)


STAGES = partial(Layout, pipeline=2, micro_batches=4, data=2)
LAYOUTS = {
    "ddp": Layout(data=4),
    "zero1": Layout(data=4, zero=1),
    "zero3": Layout(data=4, zero=3),
    "tensor": Layout(tensor=4, sequence_parallel=True),
    "ulysses": Layout(context=2, data=2, context_way="ulysses"),
    "1F1B": STAGES(tensor=2, zero=1),
    "GPipe": STAGES(schedule="gpipe", zero=3),
    "interleaved": STAGES(schedule="interleaved", chunks=2, zero=2),
    "zb_v": STAGES(schedule="zb_v", chunks=2),
    "dualpipe": STAGES(schedule="dualpipe"),
}


def of_both(recipe: Recipe) -> tuple[DryRun, DryRun]:
    ranks = recipe.layout.gpus
    return dry_run(recipe, ranks), dry_run(recipe, ranks, every_rank=True)


def compare(some: DryRun, every: DryRun, tolerance: float = 1e-5) -> None:
    assert len(some.executed) < len(every.executed)
    assert some.seconds == pytest.approx(every.seconds, rel=tolerance)
    assert some.peak == pytest.approx(every.peak, rel=1e-3)
    assert some.sent == pytest.approx(every.sent)


@pytest.mark.verifies(RUN)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_rank_of_each_class_stands_for_all(layout):
    compare(*of_both(recipe_of(layout)))


@pytest.mark.verifies(RUN)
@pytest.mark.parametrize("layout", [
    Layout(data=4, expert=2), STAGES(expert=2, zero=1),
], ids=str)  # fmt: skip
def test_so_it_is_with_experts(layout):
    compare(*of_both(recipe_of(layout, experts=True)))


@pytest.mark.verifies(RUN)
@pytest.mark.parametrize("layout", [
    Layout(data=3), Layout(data=3, zero=3), Layout(data=2, tensor=2, zero=2),
], ids=str)  # fmt: skip
def test_all_ranks_run_where_muon_deals_them_matrices(layout):
    """They send what real tensors do; momentum is half of AdamW's moments."""
    recipe, bare = recipe_of(layout), partial(dry_run, ranks=layout.gpus)
    adamw, recipe = bare(recipe), replace(recipe, optimizer=OptimizerSpec(kind="muon"))
    found = bare(recipe)
    assert list(found.executed) == list(range(layout.gpus))
    assert found.memory["optimizer state"] < adamw.memory["optimizer state"]
    cluster = VirtualCluster(layout.gpus, dgx_h100(1), record=True)
    begin = cluster.run(real_update, recipe)[0]
    sent = bytes_sent(cluster.record, found.busiest, begin, layout)
    assert found.sent == pytest.approx(sent, rel=2e-3)


def real_update(recipe: Recipe) -> float:
    """Of real tensors, the second; when it began."""
    model = wrapped_model(recipe.config, recipe.layout, sequence=recipe.data.sequence)
    optimizer = make_optimizer(model, recipe.optimizer)
    share = recipe.batch // recipe.layout.data
    tokens = torch.randint(0, 257, (share, recipe.data.sequence))
    for _ in range(2):
        dist.barrier()
        begin = now()
        train_step(model, optimizer, Batch(tokens, tokens, None, 0), recipe)
    return begin


@pytest.mark.verifies(RUN)
def test_a_ring_of_context_ranks_is_nearly_alike():
    """Its ranks merge unlike numbers of blocks."""
    compare(*of_both(recipe_of(Layout(context=4))), tolerance=5e-3)


def real_step(recipe: Recipe) -> float:
    """Of real tensors; when it began."""
    model = wrapped_model(recipe.config, recipe.layout, sequence=recipe.data.sequence)
    share = recipe.batch // recipe.layout.data
    tokens = torch.randint(0, 257, (share, recipe.data.sequence))
    dist.barrier()
    begin = now()
    lower = recipe.dtype == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        accumulate(model, tokens, tokens, micro_batches=recipe.layout.micro_batches)
    return begin


@pytest.mark.verifies(RUN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [
    Layout(tensor=2), STAGES(tensor=2), Layout(data=2, context=2),
], ids=str)  # fmt: skip
def test_real_tensors_send_as_much(layout, dtype):
    """Also under autocast: a dry run casts what it casts. Agreements are apart."""
    recipe = recipe_of(layout, dtype=dtype)
    found = dry_run(recipe, layout.gpus)
    cluster = VirtualCluster(layout.gpus, dgx_h100(1), record=True)
    begin = cluster.run(real_step, recipe)[0]
    sent = bytes_sent(cluster.record, found.busiest, begin, layout)
    for axis in ("tensor", "context", "pipeline", "data"):
        assert found.sent.get(axis, 0) == pytest.approx(sent.get(axis, 0), rel=2e-3)


@pytest.mark.verifies("xtrain.train.dry_run_table:planned")
@pytest.mark.parametrize("layout", [
    Layout(data=4, zero=1), Layout(tensor=4, sequence_parallel=True), STAGES(tensor=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_sends_what_the_planner_counts(layout, dtype):
    found = dry_run(recipe_of(layout, dtype=dtype), layout.gpus)
    for axis, nbytes in planned(found).sent.items():
        assert found.sent[axis] == pytest.approx(nbytes, rel=2e-3)


@pytest.mark.verifies("xtrain.train.dry_run_step:DryStep")
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_is_what_is_known(zero):
    """Weights, and moments in shards."""
    layout = Layout(data=4, zero=zero)
    found = dry_run(recipe_of(layout), 4)
    nbytes = 4 * found.recipe.model.parameters
    shards = 4 if zero else 1
    assert found.memory["optimizer state"] == pytest.approx(2 * nbytes / shards, 0.02)
    weights = found.memory["weights"]
    if zero < 3:
        assert weights == pytest.approx(nbytes, rel=0.02)
    else:  # and what is gathered then
        assert nbytes / 4 < weights < nbytes
    assert found.memory["activations"] > 0


@pytest.mark.verifies("xtrain.train.dry_run_shapes:Shapes")
def test_autocast_keeps_less_than_float32():
    wide, half = (
        dry_run(recipe_of(Layout(), dtype=dtype), 1).memory
        for dtype in ("float32", "bfloat16")
    )
    assert half["activations"] < 0.9 * wide["activations"]
    assert half["weights"] == wide["weights"]


def waits_for_nobody(recipe: Recipe) -> None:
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


@pytest.mark.verifies("xtrain.cli.train:show_dry_run")
def test_a_step_that_hangs_is_named(monkeypatch, capsys):
    monkeypatch.setattr(module, "step_of_rank", waits_for_nobody)
    with pytest.raises(Hangs, match="deadlock.*rank 0 -> rank 1"):
        dry_run(recipe_of(Layout(pipeline=2)), 2)
    words = "train bytes --dry-run --ranks 2 --layout.pipeline=2"
    assert main(words.split()) == 1
    assert "waits_for_nobody" in capsys.readouterr().out


@pytest.mark.verifies("xtrain.cli.train:show_dry_run")
def test_the_command_prints_the_table_and_whether_it_fits(capsys):
    words = "train bytes --dry-run --ranks 8 --topology dgx_h100 --layout.data=8"
    assert main(words.split()) == 0
    assert "\nfits: " in capsys.readouterr().out
    wide = "--model.hidden_size=12288 --model.intermediate_size=49152"
    assert main([*words.split(), *wide.split(), "--model.num_hidden_layers=8"]) == 1
    assert "\ndoes not fit: " in capsys.readouterr().out


@pytest.mark.verifies(RUN)
@pytest.mark.parametrize(("options", "message"), [
    ({"ranks": 8}, "data 4 .* = 4 ranks, but there are 8"),
    ({"topology": "ring"}, "no topology 'ring'; there are dgx_h100, nvlink"),
    ({"topology": "flat:1e-6,50e9"}, "has no accelerator.*--gpu h100"),
    ({"accelerator": "h1000"}, "unknown accelerator 'h1000'.*h100"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dry_run(recipe_of(Layout(data=4)), **{"ranks": 4, **options})


@pytest.mark.verifies(RUN)
def test_links_that_ranks_share_need_all_ranks():
    tree = "fat_tree:16,leaf=2,oversubscription=4"
    with pytest.raises(ValueError, match="all 128 would be executed: .* 64"):
        dry_run(recipe_of(Layout(data=128)), 128, tree)
    with pytest.raises(ValueError, match="replicate=2 .* all 128 would be"):
        dry_run(recipe_of(Layout(data=128, zero=3, replicate=2)), 128)
    muon = replace(recipe_of(Layout(data=128)), optimizer=OptimizerSpec(kind="muon"))
    with pytest.raises(ValueError, match="kind=muon deals .* all 128 would be"):
        dry_run(muon, 128)
    assert len(dry_run(recipe_of(Layout(data=2)), 2, "fat_tree").executed) == 2
    hybrid = Layout(data=4, zero=3, replicate=2)
    assert len(dry_run(recipe_of(hybrid), 4).executed) == 4
