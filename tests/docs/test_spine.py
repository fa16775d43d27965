"""One loss curve of one process, and every layout of lc2 to lc6 on it.

The model of lc7 has experts, so its curve of one process is another one.
"""

import math
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from xtrain_docs import config
from xtrain_docs.lectures.spine import curves
from xtrain_docs.runs import EvidenceError
from xtrain_docs.spine import compare, reference, training, wrappers

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"
ZERO = (
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
MODEL = "xtrain.model.decoder:XtrainModel"
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
LECTURES = [  # how many layouts run on 2 ranks, and on 4; what they verify
    pytest.param("lc2", 3, 3, marks=pytest.mark.verifies(
        "xtrain.data_parallel.naive:NaiveDataParallel", DDP)),
    pytest.param("lc3", 4, 4, marks=pytest.mark.verifies(*ZERO)),
    pytest.param("lc4", 2, 5, marks=pytest.mark.verifies(
        *TENSOR,
        DDP, *ZERO)),
    pytest.param("lc5", 2, 5, marks=pytest.mark.verifies(
        "xtrain.pipeline_parallel.runner:PipelineRunner",
        "xtrain.model.stages:DecoderStage", DDP, *ZERO)),
    pytest.param("lc6", 3, 5, marks=pytest.mark.verifies(
        "xtrain.model.context:SequenceCut",
        "xtrain.context_parallel.ring_attention:ring_attention",
        "xtrain.context_parallel.all_gather_attention:all_gather_attention",
        "xtrain.context_parallel.ulysses:ulysses_attention")),
    pytest.param("lc7", 1, 4, marks=pytest.mark.verifies(
        *EXPERTS, "xtrain.model.moe:TensorMoE", *ZERO[1:])),
]  # fmt: skip


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


@pytest.mark.verifies(MODEL)
@pytest.mark.parametrize("ranks", reference.RANKS)
@pytest.mark.parametrize(("lecture", "on_2", "on_4"), LECTURES)
def test_every_layout_of_a_lecture_reproduces_it(on_ranks, lecture, on_2, on_4, ranks):
    rows = [row for row in curves.rows(lecture) if ranks in row.ranks]
    assert len(rows) == {2: on_2, 4: on_4}[ranks]
    rounded = [row.name for row in rows if not row.curve(ranks)["exact"]]
    assert rounded == (["ZeRO-3 in bfloat16"] if lecture == "lc3" else [])


def loads_of_experts() -> list[list[int]]:
    """Copies that each expert of the first layer gets, of this rank's rows."""
    model = wrappers.trained_by("lc7", "experts on all ranks").model.parts[0]
    rank, size = dist.get_rank(), dist.get_world_size()
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


# --- mistakes: each changes a right training ------------------------------------------


def averaged(right):
    """The mean of the ranks' gradients, where their sum was meant."""
    gradients = right.gradients

    def mean(*rows):
        loss = gradients(*rows)
        for parameter in right.model.parameters():
            parameter.grad /= dist.get_world_size()
        return loss

    right.gradients = mean


def not_reduced(right):
    """Each rank steps with the gradients of its own rows, or of its own tokens."""
    right.model.stages[0].module.reduce_gradients = lambda: None
    right.model.parts[0].sync_gradients = lambda: None


def all_inside_no_sync(right):
    gradients, ddp = right.gradients, right.model.stages[0].module
    ddp.no_sync, no_sync = nullcontext, ddp.no_sync

    def quiet(*rows):
        with no_sync():
            return gradients(*rows)

    right.gradients = quiet


def reduced_twice(right):
    """The sum over the ranks is summed over them once more."""
    wrapper = right.model.stages[0].module
    once = wrapper.reduce_gradients
    wrapper.reduce_gradients = lambda: (once(), once())


def clipped_alone(right):
    """One rank steps with gradients of another size."""
    clip, factor = right.clip, 1 + dist.get_rank()
    right.clip = lambda norm: clip(norm * factor)


def clipped_by_its_own_norm(right):
    """The norm of one rank's slices or stages, where that of all was meant."""
    right.clip = training.clip(right.model)


def mean_of_micro_batch_means(right):
    """Each micro-batch divided by its own count, where they are summed."""
    (part,) = right.model.parts
    bare = part.loss_fn
    part.loss_fn = lambda *both: (bare(*both)[0] / bare(*both)[1].clamp(min=1), 1)


def labels_of_other_tokens(right):
    """Tokens are cut by zigzag, and labels into runs."""
    (model,) = right.model.parts
    cut, sums, step = model.context, model.run, right.gradients

    def run(*tokens_and_masks):
        logits = sums(*tokens_and_masks)
        model.context = cut._replace(balance="none")  # for the labels
        return logits

    def gradients(*rows):
        model.context = cut
        return step(*rows)

    model.run, right.gradients = run, gradients


def expert_gradients_divided_by_the_ranks(right):
    """An average where the sum of all ranks' tokens was there already."""
    (model,) = right.model.parts
    summed = model.sync_gradients

    def sync():
        summed()
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.grad /= dist.get_world_size()

    model.sync_gradients = sync


def routers_not_summed(right):
    """Each rank steps with its own tokens' gradient of the routers."""
    (model,) = right.model.parts
    named = model.named_parameters()
    routers = [p for name, p in named if name.endswith("router.weight")]
    summed = model.sync_gradients
    assert routers

    def sync():
        own = [p.grad.clone() for p in routers]
        summed()
        for parameter, gradient in zip(routers, own, strict=True):
            parameter.grad = gradient

    model.sync_gradients = sync


EXPERT = ("lc7", "experts on all ranks")


@pytest.mark.parametrize(
    ("lecture", "name", "mistake"),
    [
        ("lc2", "DDP", averaged),
        ("lc2", "naive", not_reduced),
        ("lc2", "DDP, two micro-batches", all_inside_no_sync),
        ("lc2", "naive", reduced_twice),
        ("lc2", "naive", clipped_alone),
        ("lc4", "tensor", clipped_by_its_own_norm),
        ("lc5", "1F1B", clipped_by_its_own_norm),
        ("lc5", "1F1B", mean_of_micro_batch_means),
        ("lc6", "ring, zigzag", not_reduced),
        ("lc6", "ring, zigzag", labels_of_other_tokens),
        (*EXPERT, expert_gradients_divided_by_the_ranks),
        (*EXPERT, routers_not_summed),
    ],
)
def test_a_mistake_leaves_the_curve(world, on_ranks, lecture, name, mistake):
    found = world(2).run(mistaken, lecture, name, mistake)
    right = curves.rows(lecture)[0].right()
    with pytest.raises(EvidenceError, match="by hand"):
        compare.checked(found, right, "by hand")


def mistaken(lecture, name, mistake):
    right = wrappers.trained_by(lecture, name)
    mistake(right)
    return training.run(right)


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

    def found(function, ranks):
        changed = [right["norm"][0] + 5e-13, *right["norm"][1:]]
        loss = [right["loss"][0] - off[ranks], *right["loss"][1:]]
        return [{"exact": True, "loss": loss, "norm": changed}] * ranks

    monkeypatch.setattr(compare.runs, "remembered", found)
    table = compare.table_of([compare.Row("ours", dict, ())])
    assert list(table.header) == ["", "loss, 2 ranks", "loss, 4 ranks", "gradient norm"]
    name, *cells = table.rows[0]
    assert name == "ours"
    assert [float(cell[:3]) for cell in cells] == pytest.approx([2, 3, 5], abs=0.1)
    assert all(cell.endswith("10⁻¹³") for cell in cells)
    table = compare.table_of([compare.Row("ours", dict, (), ranks=(4,))])
    assert list(table.rows[0]) == ["ours", "", *cells[1:]]


def test_small_numbers_are_written_as_powers():
    assert compare.power(0.0) == "0"
    assert compare.power(2.54e-14) == "2.5\u00a0·\u00a010⁻¹⁴"
    assert compare.power(0.0849) == "0.085"
