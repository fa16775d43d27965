"""One loss curve of one process, and every wrapper of lc2 to lc6 on it.

That of lc7 has experts, so its curve of one process is another one.
"""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain_docs import config
from xtrain_docs.lectures.lc2 import runs_spine as lc2_runs
from xtrain_docs.lectures.lc4 import runs_spine as lc4_runs
from xtrain_docs.lectures.lc5 import runs_spine as lc5_runs
from xtrain_docs.lectures.lc6 import runs_spine as lc6_runs
from xtrain_docs.lectures.lc7 import runs_spine as lc7_runs
from xtrain_docs.lectures.spine import curves
from xtrain_docs.runs import EvidenceError
from xtrain_docs.spine import compare, reference, training

DATA_PARALLEL = (
    "xtrain.data_parallel.naive:NaiveDataParallel",
    "xtrain.data_parallel.ddp:DistributedDataParallel",
)
ZERO = (
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
MODEL = "xtrain.model.decoder:XtrainModel"
PIPELINE = (
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.model.stages:DecoderStage",
)
CONTEXT = (
    "xtrain.model.context:SequenceCut",
    "xtrain.context_parallel.ring_attention:ring_attention",
    "xtrain.context_parallel.all_gather_attention:all_gather_attention",
    "xtrain.context_parallel.ulysses:ulysses_attention",
)
EXPERTS = (
    "xtrain.expert_parallel.gshard:GShardMoE",
    "xtrain.model.moe:make_moe",
    "xtrain.model.balance:auxiliary_loss",
    "xtrain.model.mesh_axes:batch_group",
)
TENSOR = (
    "xtrain.model.modules:TensorParallelModules",
    "xtrain.model.parameters:placement_of",
)


@pytest.mark.verifies(MODEL, "xtrain.model.loss:mean_cross_entropy")
def test_the_reference_is_what_one_process_gives(capsys):
    assert reference.main([]) == 0
    assert "largest difference to reference.json" in capsys.readouterr().out
    losses = reference.reference()["loss"]
    assert len(losses) == training.STEPS
    assert losses[0] == pytest.approx(math.log(training.CONFIG.vocab_size), abs=0.3)
    assert min(losses) < losses[0] / 2


def test_another_curve_is_not_the_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    assert reference.main(["--write"]) == 0
    assert reference.main([]) == 0
    monkeypatch.setitem(training.ADAMW, "lr", 0.0201)
    assert reference.main([]) == 1
    assert "e-" in capsys.readouterr().out


def test_the_run_has_what_mistakes_need_to_show():
    """Ranks with other numbers of tokens, a rank with none, steps with no clipping."""
    tokens = [
        [int((labels[rank::4] != training.IGNORED).sum()) for rank in range(4)]
        for labels in (training.batch(step)[1] for step in range(training.STEPS))
    ]
    assert all(len(set(counts)) > 1 for counts in tokens)
    assert any(0 in counts for counts in tokens)
    clipped = [norm > training.MAX_NORM for norm in reference.reference()["norm"]]
    assert {True, False} == set(clipped)


@pytest.mark.verifies(*DATA_PARALLEL, MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_data_parallelism_reproduces_it(on_ranks, ranks):
    assert [row.curve(ranks)["exact"] for row in curves.rows("lc2")] == [True] * 3


@pytest.mark.verifies(*ZERO, MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_every_stage_of_zero_reproduces_it(on_ranks, ranks):
    found = [row.curve(ranks) for row in curves.rows("lc3")]
    assert [curve["exact"] for curve in found] == [True, True, True, False]


@pytest.mark.verifies(*TENSOR, *DATA_PARALLEL[1:], *ZERO, MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_tensor_ranks_reproduce_it_alone_and_beside_data_ranks(on_ranks, ranks):
    rows = [row for row in curves.rows("lc4") if ranks in row.ranks]
    assert len(rows) == {2: 2, 4: 5}[ranks]
    assert all(row.curve(ranks)["exact"] for row in rows)


@pytest.mark.verifies(*PIPELINE, *DATA_PARALLEL[1:], *ZERO, MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_stages_reproduce_it_alone_and_on_data_ranks(on_ranks, ranks):
    rows = [row for row in curves.rows("lc5") if ranks in row.ranks]
    assert len(rows) == {2: 2, 4: 5}[ranks]
    assert all(row.curve(ranks)["exact"] for row in rows)


@pytest.mark.verifies(*CONTEXT, MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_context_ranks_reproduce_it_alone_and_beside_others(on_ranks, ranks):
    rows = [row for row in curves.rows("lc6") if ranks in row.ranks]
    assert len(rows) == {2: 3, 4: 5}[ranks]
    assert all(row.curve(ranks)["exact"] for row in rows)


@pytest.mark.verifies(*EXPERTS, "xtrain.model.moe:TensorMoE", *ZERO[1:], MODEL)
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_experts_on_ranks_reproduce_one_process_alone_and_beside_others(
    on_ranks, ranks
):
    rows = [row for row in curves.rows("lc7") if ranks in row.ranks]
    assert len(rows) == {2: 1, 4: 4}[ranks]
    assert all(row.curve(ranks)["exact"] for row in rows)


def loads_of_experts() -> list[list[int]]:
    """Copies that each expert of the first layer gets, of this rank's rows."""
    model = lc7_runs.trained_by("expert").model
    rank, size = training.place()
    found = []
    for step in range(len(training.ROWS)):
        with torch.no_grad():
            model(*(whole[rank::size] for whole in training.batch(step)))
        found.append(model.routings()[0].counts_E.tolist())
    return found


@pytest.mark.verifies(*EXPERTS[:2])
def test_the_run_with_experts_has_what_mistakes_need_to_show(world, on_ranks):
    """Ranks and experts have other numbers of copies, and one rank has none."""
    loads = world(4).run(loads_of_experts)
    assert all(
        len({tuple(of) for of in step}) == 4 for step in zip(*loads, strict=True)
    )
    assert any(not any(step) for of_rank in loads for step in of_rank)
    curve = curves.with_experts()
    assert {True, False} == {norm > training.MAX_NORM for norm in curve["norm"]}
    assert min(curve["loss"]) < curve["loss"][0] / 2
    assert reference.difference(curve, reference.reference(), "loss") > 1e-3


def averaged(rank: int):
    """The mean of the ranks' gradients, where their sum was meant."""
    del rank
    model = DistributedDataParallel(training.new_model())
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    return training.run(training.Training(model, optimizer, training.clip(model)))


def not_reduced(rank: int):
    del rank
    right = lc2_runs.trained_by("naive")
    right.reduce = lambda: None
    return training.run(right)


def all_inside_no_sync(rank: int):
    del rank
    right = lc2_runs.trained_by("no_sync")
    right.sync = lambda is_last: right.model.no_sync()
    return training.run(right)


def reduced_every_time(rank: int):
    """Each micro-batch is summed over the ranks, the first one once too often."""
    del rank
    right = lc2_runs.trained_by("naive")
    right.micro_batches, right.sync = 2, lambda is_last: nullcontext()
    backward = torch.Tensor.backward

    def and_reduce(loss, *arguments):
        backward(loss, *arguments)
        right.model.reduce_gradients()

    right.reduce = lambda: None
    torch.Tensor.backward = and_reduce
    try:
        return training.run(right)
    finally:
        torch.Tensor.backward = backward


def clipped_alone(rank: int):
    """One rank steps with gradients of another size."""
    right = lc2_runs.trained_by("ddp")
    model = right.model
    right.clip = lambda norm: nn.utils.clip_grad_norm_(
        model.parameters(), norm * (1 + rank)
    )
    return training.run(right)


def slices_clipped_by_their_own_norm(rank: int):
    """The norm of one tensor rank's slices, where that of all of them was meant."""
    del rank
    right = lc4_runs.trained_by("tensor")
    right.clip = training.clip(right.model)
    return training.run(right)


def each_stage_clipped_by_its_own_norm(rank: int):
    """The norm of one rank's stages, where that of the whole model was meant."""
    del rank
    right = lc5_runs.trained_by("one_f_one_b")
    right.clip = lambda norm: nn.utils.clip_grad_norm_(
        [p for stage in right.model for p in stage.parameters()], norm
    )
    return training.run(right)


def mean_of_micro_batch_means(rank: int):
    """Each micro-batch divided by its own count, where they are summed."""
    del rank
    right = lc5_runs.trained_by("one_f_one_b")
    (stage,) = right.model
    bare = stage.module.loss_fn
    runner = PipelineRunner(
        right.model,
        SCHEDULES["one_f_one_b"](2, 4),
        lambda *both: (bare(*both)[0] / bare(*both)[1].clamp(min=1), 1),
    )
    more = lc5_runs.with_more_rows
    right.whole_step = lambda tokens, labels: runner.step(
        more(tokens, 0), more(labels, training.IGNORED)
    )
    return training.run(right)


def not_summed_over_context(rank: int):
    """Each rank steps with the gradients of its own part of the sequences."""
    del rank
    right = lc6_runs.trained_by("ring")
    right.reduce = lambda: None
    return training.run(right)


def labels_of_other_tokens(rank: int):
    """Tokens are cut by zigzag, and labels into runs."""
    del rank
    right = lc6_runs.trained_by("ring")
    cut = right.model.context
    sums = right.model.run

    def run(tokens, positions=None, mask=None):
        logits = sums(tokens, positions, mask=mask)
        right.model.context = cut._replace(balance="none")  # for the labels
        return logits

    def forward(tokens, labels):
        right.model.context = cut
        return right.model(tokens, labels)

    right.model.run = run
    twin = training.Training(
        forward, right.optimizer, right.clip, right.reduce, data=right.data
    )
    twin.mean_of_all = True
    return training.run(twin)


def expert_gradients_divided_by_the_ranks(rank: int):
    """An average where the sum of all ranks' tokens was there already."""
    del rank
    right = lc7_runs.trained_by("expert")
    summed = right.reduce

    def reduce():
        summed()
        for name, parameter in right.model.named_parameters():
            if ".experts." in name:
                parameter.grad /= training.place()[1]

    right.reduce = reduce
    return training.run(right)


def routers_not_summed(rank: int):
    """Each rank steps with its own tokens' gradient of the routers."""
    del rank
    right = lc7_runs.trained_by("expert")
    summed = right.reduce

    def reduce():
        routers = [
            p for n, p in right.model.named_parameters() if n.endswith("router.weight")
        ]
        assert routers
        own = [p.grad.clone() for p in routers]
        summed()
        for parameter, gradient in zip(routers, own, strict=True):
            parameter.grad = gradient

    right.reduce = reduce
    return training.run(right)


@pytest.mark.parametrize(
    "broken",
    [
        averaged,
        not_reduced,
        all_inside_no_sync,
        reduced_every_time,
        clipped_alone,
        slices_clipped_by_their_own_norm,
        each_stage_clipped_by_its_own_norm,
        mean_of_micro_batch_means,
        not_summed_over_context,
        labels_of_other_tokens,
    ],
    ids=lambda function: function.__name__,
)
def test_a_mistake_leaves_the_curve(world, broken):
    found = world(2).run(by_rank, broken)
    with pytest.raises(EvidenceError, match="by hand"):
        compare.checked(found, reference.reference(), "by hand")


@pytest.mark.parametrize(
    "broken",
    [expert_gradients_divided_by_the_ranks, routers_not_summed],
    ids=lambda function: function.__name__,
)
def test_a_mistake_with_experts_leaves_their_curve(world, on_ranks, broken):
    found = world(2).run(by_rank, broken)
    with pytest.raises(EvidenceError, match="by hand"):
        compare.checked(found, curves.with_experts(), "by hand")


def by_rank(broken):
    return broken(training.place()[0])


def test_ranks_that_disagree_and_curves_that_are_not_rounded_are_refused():
    right = reference.reference()
    other = {**right, "loss": [*right["loss"][:-1], 0.0]}
    for found, words in (
        ([right, other], "different losses"),
        ([other, other], r"loss differs by .* from one process"),
        ([{**right, "exact": False}], "nothing was rounded"),
        ([{**right, "loss": right["loss"][1:]}], "differs by inf"),
        ([{**right, "norm": [math.nan] * training.STEPS}], "norm differs by nan"),
    ):
        with pytest.raises(EvidenceError, match=words):
            compare.checked(found, right, "by hand")


def test_the_figure_marks_every_step_once_where_the_loss_is():
    right = [3.0, 2.0, 1.0, 0.5]
    drawing = compare.chart(right, {"a": right, "b": [3.0, 2.5, 1.0, 0.5]}, "title")
    hovers = re.findall(r"<title>(\w, step \d: [\d.]+)</title>", drawing)
    assert hovers == ["a, step 1: 3.000000", "a, step 3: 1.000000",
                      "b, step 2: 2.500000", "b, step 4: 0.500000"]  # fmt: skip
    (line,) = re.findall(r'<polyline points="([^"]+)"', drawing)
    heights = [float(point.split(",")[1]) for point in line.split()]
    dots = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', drawing)]
    assert dots[1:] == [heights[0], heights[2]]  # the first one is the legend's
    squares = re.findall(r'<polygon points="[\d.]+,([\d.]+)', drawing)
    assert float(squares[1]) + 5.5 < heights[1]  # 2.5 is above 2


def test_a_table_has_the_largest_differences_by_world_size(monkeypatch):
    right = reference.reference()
    off = {2: 2e-13, 4: 3e-13}

    def found(function, ranks, argument):
        changed = [right["norm"][0] + 5e-13, *right["norm"][1:]]
        loss = [right["loss"][0] - off[ranks], *right["loss"][1:]]
        return [{"exact": True, "loss": loss, "norm": changed}] * ranks

    monkeypatch.setattr(compare.runs, "remembered", found)
    table = compare.table_of([compare.Row("ours", dict, "")])
    assert list(table.header) == ["", "loss, 2 ranks", "loss, 4 ranks", "gradient norm"]
    name, *cells = table.rows[0]
    assert name == "ours"
    assert [float(cell[:3]) for cell in cells] == pytest.approx([2, 3, 5], abs=0.1)
    assert all(cell.endswith("10⁻¹³") for cell in cells)
    table = compare.table_of([compare.Row("ours", dict, "", ranks=(4,))])
    assert list(table.rows[0]) == ["ours", "", *cells[1:]]


def test_small_numbers_are_written_as_powers():
    assert compare.power(0.0) == "0"
    assert compare.power(2.54e-14) == "2.5\u00a0·\u00a010⁻¹⁴"
    assert compare.power(0.0849) == "0.085"
