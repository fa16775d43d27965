"""The figures and tables of lc3: what runs recorded is what the pages say."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.blocks import registry
from xtrain_docs.lectures.lc3 import (
    adam,
    clipping,
    index,
    stage_1_and_2,
    stage_3,
    timeline,
    traffic,
)
from xtrain_docs.lectures.lc3.common import STAGES, Tower

SMALL = (4, 32, 4)  # layers, width, tokens
PHONE = 324  # pixels inside a figure's frame on a screen of 390


@pytest.mark.verifies(
    "xtrain.plan.memory:state_memory",
    "xtrain.zero.buckets:ShardedBucket",
    "xtrain.zero.flat_param_group:FlatParamGroup",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_held_equal_the_formula(on_ranks, ranks):
    for stage in STAGES:
        for bf16 in (False, True):
            expected = index.formula_of(stage, ranks, bf16)
            found = runs.remembered(index.bytes_held, ranks, stage, bf16)
            assert found == [expected] * ranks, (stage, bf16)


def spans(step, lane):
    """The bars of a lane in each row, in order: (begin, end)."""
    rows = {}
    for what, row, begin, end in sorted(step["bars"], key=lambda bar: bar[2]):
        if what == lane:
            rows.setdefault(row, []).append((begin, end))
    return rows


@pytest.mark.verifies(
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.fsdp_schedule:UnitSchedule",
)
def test_a_unit_is_gathered_before_the_one_before_it_computes_and_freed_after(on_ranks):
    for step in runs.remembered(stage_3.fsdp_step_by_the_clock, 2, *SMALL):
        gathers, whole = spans(step, "all-gather"), spans(step, "whole")
        scatters = spans(step, "reduce-scatter")
        for pass_, lane in enumerate(("forward", "backward")):
            computes = {row: bars for row, (bars,) in spans(step, lane).items()}
            order = sorted(computes, key=computes.get)
            assert order == ([0, 1, 2, 3], [3, 2, 1, 0])[pass_]
            for unit, following in zip(order, [*order[1:], None], strict=True):
                begin, end = computes[unit]
                gathered, freed = whole[unit][pass_]
                assert gathered <= gathers[unit][pass_][0] < begin < end <= freed
                if following is not None:
                    assert gathers[following][pass_][0] < begin
                    assert freed < computes[following][0]
                if lane == "backward":
                    ((reduced, _),) = scatters[unit]
                    assert end <= reduced
        assert {len(bars) for bars in (*gathers.values(), *whole.values())} == {2}
        assert timeline.most_at_once(step, "whole") == 2


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
@pytest.mark.parametrize("stage", ["1", "2"])
def test_stage_1_reduces_after_backward_and_stage_2_in_it(on_ranks, stage):
    for step in runs.remembered(stage_1_and_2.zero_step_by_the_clock, 2, stage, *SMALL):
        over = step["ends"]["backward"]
        for bucket in range(4):
            lanes = ("backward", "reduce-scatter", "whole", "step", "all-gather")
            ((_, backward), (reduced, _), (_, freed), (begin, end), (gathered, _)) = (
                spans(step, lane)[bucket][0] for lane in lanes
            )
            assert backward < reduced < freed < begin < end < gathered
            assert (reduced < over) == (stage == "2")
        most = timeline.most_at_once(step, "whole")
        assert most == (4 if stage == "1" else 2)


@pytest.mark.verifies(
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.flat:FlatLayout",
)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_together_hold_every_element_of_what_is_sharded_once(on_ranks, stage):
    total = Tower().size
    found = runs.remembered(stage_1_and_2.parts_held, 4, stage)
    for place, of_ranks in enumerate(zip(*found, strict=True)):
        if place < 3 - int(stage):  # weights, gradients, optimizer state
            assert of_ranks == ([[0, total]],) * 4
            continue
        every = sorted(r for ranges in of_ranks for r in ranges)
        assert [a for a, _ in every] == [0, *(b for _, b in every[:-1])]
        assert every[-1][1] == total
        assert {sum(b - a for a, b in part) for part in of_ranks} == {total // 4}


def test_calls_of_a_step_are_as_long_as_what_they_send(on_ranks):
    half = 4 * Tower().size / 2
    phases = {"0": ["backward"], "1": ["step"], "2": ["backward", "step"],
              "3": ["forward", "backward"]}  # fmt: skip
    for stage, times in zip(STAGES, (2, 2, 2, 3), strict=True):
        calls = runs.remembered(traffic.calls_by_phase, 2, stage)[0]
        assert list(dict.fromkeys(call[0] for call in calls)) == phases[stage]
        sent = sum(sent for *_, sent in calls)
        assert sent == pytest.approx(times * half, rel=1e-4)
    assert len(calls) == 3 * 6


def test_drawings_tell_what_was_computed(on_ranks):
    assert "stage 3 sends 3.00 halves of an all-reduce" in traffic.step_calls(2)
    words = "25 + 0 + 144 + 0 = 169, so the norm is 13, the factor 0.1"
    assert words in clipping.clipping_picture(4, 1.3)
    steps = adam.adam_steps([1.0] * 5 + [-1.0] * 5)
    assert steps[0] == pytest.approx([0.1, 0.001**0.5, 1], rel=1e-6)
    assert steps[5][0] == pytest.approx(0.9 * (1 - 0.9**5) - 0.1)
    flat = registry("figure").run("flat_cut", {})
    assert "rank 1 holds 1 of a, 3 of b" in flat
    assert len(re.findall(r'class="xt-bar-fill', flat)) == 2 * 14
    assert "Alone it stays at 1;" in registry("figure").run("bf16_steps", {})


def test_bars_lie_where_their_times_are():
    step = {"bars": [["forward", 1, 0.25, 0.75]], "ends": {"step": 1.0}}
    drawing = timeline.timeline({"": step}, "unit", {}, "title")
    ((x, wide),) = re.findall(
        r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawing
    )
    whole = timeline.WIDTH - timeline.LEFT - 6
    assert float(x) == pytest.approx(timeline.LEFT + whole / 4, abs=0.1)
    assert float(wide) == pytest.approx(whole / 2, abs=0.1)


def test_every_figure_of_the_lecture_fits_a_phone(on_ranks):
    figures = registry("figure")
    lecture = "xtrain_docs.lectures.lc3."
    ours = [n for n, f in figures.items() if f.__module__.startswith(lecture)]
    assert len(ours) >= 10
    for name in ours:
        drawing = figures.run(name, {})
        assert drawing.startswith("<svg")
        wide = float(re.search(r'viewBox="0 0 (\d+)', drawing)[1])
        assert f"min-width:{round(0.8 * wide)}px" in drawing, name  # and no more
        assert 0.8 * wide <= PHONE, name  # so it shrinks and does not scroll
        right = max(map(float, re.findall(r'<text x="([\d.]+)"', drawing)))
        assert right <= wide
