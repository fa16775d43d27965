"""The timelines and pictures of lc3: what was recorded is what is drawn, or refused."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.blocks import registry
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc3 import (
    checkpoint,
    clipping,
    fsdp_timeline,
    lanes,
    runs_parts,
    runs_phases,
    runs_timeline,
    runs_training,
    runs_values,
    shards,
    step_calls,
    zero_timeline,
)

SMALL = (4, 32, 4)  # layers, width, tokens
PHONE = 324  # pixels inside a figure's frame on a screen of 390
DRAWING = (
    "adam", "checkpoint", "clipping", "figures", "fsdp_timeline", "model", "shards",
    "step_calls", "zero_timeline",
)  # fmt: skip


@pytest.fixture
def fsdp_events(on_ranks):
    return runs.remembered(runs_timeline.fsdp_step_by_the_clock, 2, *SMALL)


@pytest.fixture
def zero_events(on_ranks):
    return {
        stage: runs.remembered(runs_timeline.zero_step_by_the_clock, 2, stage, *SMALL)[
            0
        ]
        for stage in "12"
    }


def moved(events, wanted, before):
    """The events with the first of a kind just before another one."""
    at = next(i for i, event in enumerate(events) if event[:2] == wanted)
    rest = [*events[:at], *events[at + 1 :]]
    place = next(i for i, event in enumerate(rest) if event[:2] == before)
    time = rest[place][2]
    return [*rest[:place], [*wanted, time], *rest[place:]]


@pytest.mark.verifies(
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.fsdp_schedule:UnitSchedule",
)
def test_a_unit_is_gathered_before_the_one_before_it_computes_and_freed_after(
    fsdp_events,
):
    for events in fsdp_events:
        fsdp_timeline.check_fsdp(events, 4)
    seen = [event[:2] for event in fsdp_events[0]]
    gathers = [n for what, n in seen if what == "unshard"]
    assert gathers == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [n for what, n in seen if what == "reduce-scatter"] == [3, 2, 1, 0]
    assert seen.index(["unshard", 1]) < seen.index(["forward", 0])
    assert seen.index(["reshard", 0]) < seen.index(["forward", 1])


def test_another_order_of_a_unit_is_refused(fsdp_events):
    right = fsdp_events[0]
    planted = [
        (["forward", 2], ["unshard waited", 2], "unit 2: no 'forward'"),
        (["forward ends", 1], ["forward", 1], "unit 1: no 'forward ends'"),
        (["reduce-scatter", 1], ["backward ends", 1], "unit 1: no 'reduce-scatter'"),
        (["unshard", 1], ["forward", 1], "forward 0 began without a prefetch"),
    ]
    for event, before, problem in planted:
        with pytest.raises(EvidenceError, match=problem):
            fsdp_timeline.check_fsdp(moved(right, event, before), 4)
    kept = [event for event in right if event[:2] != ["reshard", 1]]
    with pytest.raises(EvidenceError, match="unit 1: no 'reshard'"):
        fsdp_timeline.check_fsdp(kept, 4)


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer",
)
def test_stage_1_reduces_after_backward_and_stage_2_in_it(zero_events):
    for stage, events in zero_events.items():
        zero_timeline.check_zero(events, stage, 4)
    with pytest.raises(EvidenceError, match="stage 2 reduces bucket 0"):
        zero_timeline.check_zero(zero_events["1"], "2", 4)
    with pytest.raises(EvidenceError, match="stage 1 reduces bucket 0"):
        zero_timeline.check_zero(zero_events["2"], "1", 4)


def test_a_step_that_does_not_wait_for_a_bucket_is_refused(zero_events):
    events = moved(zero_events["2"], ["step", 0], ["reduce-scatter waited", 0])
    with pytest.raises(EvidenceError, match="bucket 0 in another order"):
        zero_timeline.check_zero(events, "2", 4)


def test_bars_lie_where_their_times_are(fsdp_events, zero_events):
    bars = [lanes.Bar(1, "forward", 0.25, 0.75, "F")]
    (box,) = (p for p in lanes.draw(bars, ["a", "b"], [], 1.0, 0) if "rect" in p)
    wide = lanes.WIDTH - lanes.LEFT - 6
    x, width = (float(re.search(rf'{k}="([\d.]+)"', box)[1]) for k in ("x", "width"))
    assert x == pytest.approx(lanes.LEFT + wide / 4, abs=0.1)
    assert width == pytest.approx(wide / 2, abs=0.1)
    assert "at most 2 units are whole" in fsdp_timeline.fsdp_chart(fsdp_events[0], 4)
    drawing = zero_timeline.zero_chart(zero_events, 4)
    assert "stage 1 has 4 buckets of whole gradients at most" in drawing
    assert "stage 2 has 2 buckets of whole gradients at most" in drawing


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.flat:FlatLayout",
)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_ranks_together_hold_every_element_of_what_is_sharded_once(on_ranks, stage):
    total = runs_training.parameters_of_tower()
    sharded = ("optimizer state", "gradients", "weights")[: int(stage)]
    found = runs.remembered(runs_parts.parts_held, 4, stage)
    for kind in shards.KINDS:
        ranges = [held[kind] for held in found]
        if kind in sharded:
            every = runs_parts.joined([r for part in ranges for r in part])
            assert every == [[0, total]]
            assert {sum(b - a for a, b in part) for part in ranges} == {total // 4}
        else:
            assert ranges == [[[0, total]]] * 4
    assert shards.parts_chart({stage: found}, total).startswith("<svg")


def test_calls_of_a_step_are_as_long_as_what_they_send(on_ranks):
    phi = 4 * runs_training.parameters_of_tower()
    phases = {"0": ["backward"], "1": ["step"], "2": ["backward", "step"],
              "3": ["forward", "backward"]}  # fmt: skip
    for stage, times in {"0": 2, "1": 2, "2": 2, "3": 3}.items():
        calls = runs.remembered(runs_phases.calls_by_phase, 2, stage)[0]
        assert list(dict.fromkeys(call[0] for call in calls)) == phases[stage]
        assert sum(sent for *_, sent in calls) == pytest.approx(
            times * phi / 2, rel=1e-4
        )
    drawing = step_calls.step_calls(2)
    assert "stage 3 sends 3.00 halves of an all-reduce" in drawing


@pytest.mark.verifies("xtrain.zero.flat:FlatLayout")
def test_the_flat_picture_has_every_element_once_and_the_padding(on_ranks):
    found = runs.remembered(runs_values.flat_shards, 4)
    drawing = shards.flat_chart(found, runs_values.SHAPES)
    assert len(re.findall(r'class="xt-bar-fill', drawing)) == 2 * 14
    assert len(re.findall(r'fill="none"', drawing)) == 2 * 2
    assert "rank 1 holds 1 of a, 3 of b" in drawing
    found[0]["shard"], found[1]["shard"] = found[1]["shard"], found[0]["shard"]
    with pytest.raises(EvidenceError, match="the shards end to end"):
        shards.flat_chart(found, runs_values.SHAPES)


@pytest.mark.verifies("xtrain.zero.clip:clip_sharded_grad_norm_")
def test_the_picture_of_clipping_adds_squares(on_ranks):
    arguments = (runs_values.clipped_shards, 4, clipping.GRADIENT, 1.3)
    found = runs.remembered(*arguments)
    assert [held["own"] for held in found] == [25, 0, 144, 0]
    assert {held["norm"] for held in found} == {13}
    drawing = clipping.clipping_chart(found, 1.3)
    assert "25 + 0 + 144 + 0 = 169, so the norm is 13, the factor 0.1" in drawing
    found[2]["summed"] = 25.0 + 144.0 + 1
    with pytest.raises(EvidenceError, match="squares add up to 169"):
        clipping.clipping_chart(found, 1.3)


@pytest.mark.verifies("xtrain.zero.adam:Adam")
def test_the_first_step_of_adam_is_the_learning_rate_and_the_mean_lags(on_ranks):
    rows = runs.remembered(runs_values.adam_steps, 1, [1.0] * 5 + [-1.0] * 5, 0.01)[0]
    assert rows[0] == pytest.approx([0.1, 0.001**0.5, 1], rel=1e-6)
    assert [step for *_, step in rows[:5]] == pytest.approx([1] * 5, rel=1e-6)
    assert rows[5][0] == pytest.approx(0.9 * (1 - 0.9**5) - 0.1)


@pytest.mark.verifies("xtrain.zero.mixed_precision:MixedPrecisionOptimizer")
def test_only_the_weight_with_a_master_moves(on_ranks):
    found = runs.remembered(runs_values.small_steps, 1, 30, 0.001)[0]
    assert set(found["alone"]) == {1.0}
    assert found["master"][-1] == pytest.approx(0.97, abs=1e-5)
    assert abs(found["with a master"][-1] - 0.97) < 2**-8


@pytest.mark.verifies("xtrain.checkpoint.training_state:save_checkpoint")
def test_the_folder_of_a_checkpoint_has_a_file_a_rank(on_ranks):
    files = runs.remembered(runs_values.folder_of_checkpoint, 2)[0]
    step = "run/step-00000020"
    ranks = [f"{step}/rank-{rank:05d}.safetensors" for rank in range(2)]
    expected = ["run/.lock", "run/latest", f"{step}/index.json", *ranks]
    assert [path for path, _ in files] == expected
    drawing = checkpoint.tree_chart(files)
    assert drawing.count(">run/<") == drawing.count(">step-00000020/<") == 1
    assert drawing.count(">the pieces of one rank<") == 2


def test_every_figure_of_the_lecture_fits_a_phone(on_ranks):
    figures = registry("figure")
    lecture = "xtrain_docs.lectures.lc3"
    modules = [f"{lecture}.{name}" for name in DRAWING]
    ours = [name for name, figure in figures.items() if figure.__module__ in modules]
    assert len(ours) >= 14
    for name in ours:
        drawing = figures.run(name, {})
        assert drawing.startswith("<svg")
        assert "min-width:0" in drawing, name  # it shrinks and does not scroll
        wide = float(re.search(r'viewBox="0 0 (\d+)', drawing)[1])
        assert 0.8 * wide <= PHONE, name
        right = max(map(float, re.findall(r'<text x="([\d.]+)"', drawing)))
        assert right <= wide
