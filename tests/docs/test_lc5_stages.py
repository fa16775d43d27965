"""The picture and tables of the page on stages are of stages that ranks have made."""

import re

import pytest

from xtrain.plan import ModelShape
from xtrain.schedules import SCHEDULES
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import stages

BOX = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="18"'
MODEL = (
    "xtrain.model.stages:make_modules",
    "xtrain.model.span:DecoderSpan",
    "xtrain.model.span_weights:SpanWeights",
)


@pytest.mark.verifies(*MODEL)
def test_the_ranks_hold_the_stages_of_their_placement(on_ranks):
    whole = ModelShape.preset(stages.PRESET).parameters
    for schedule, _ in stages.PLACEMENTS:
        made = SCHEDULES[schedule](4, 8)
        found = stages.held(schedule)
        for rank, held in enumerate(found):
            assert [of["stage"] for of in held] == list(made.stages_of(rank))
        together = sum(of["parameters"] for held in found for of in held)
        assert together == made.parameter_copies * whole
        parts = [of["parts"] for held in found for of in held]
        numbers = sorted(n for part in parts for n in range(*part))
        assert numbers == sorted([*range(34)] * made.parameter_copies)
        rows = stages.parameters_of_stages(schedule).rows
        assert len(rows) == 5 and "of the" not in rows[4][1]


def test_a_box_of_the_picture_for_every_part_of_every_stage(on_ranks):
    drawn = stages.stages_of_a_model()
    copies = [SCHEDULES[s](4, 8).parameter_copies for s, _ in stages.PLACEMENTS]
    assert drawn.count("<rect") == 34 * sum(copies)
    rights = [float(x) + float(wide) for x, wide in re.findall(BOX, drawn)]
    assert max(rights) < stages.WIDTH - 7
    assert "DualPipe: rank 3 holds stage 0 and stage 3" in drawn


def test_other_counts_stop_the_build(on_ranks, monkeypatch):
    found = [[dict(of) for of in held] for held in stages.held("zb_v")]
    found[1][0]["parameters"] += 1
    monkeypatch.setattr(stages, "held", lambda schedule: found)
    with pytest.raises(EvidenceError, match="zb_v: .* not 1 whole models"):
        stages.parameters_of_stages("zb_v")


@pytest.mark.verifies("xtrain.model.stages:part_costs")
def test_a_cut_by_cost_is_never_slower_and_the_head_costs_layers():
    for row in stages.cut_by_layers_or_cost().rows:
        assert 1 <= float(row[2]) < float(row[1])
    heads = {row[0]: float(row[4]) for row in stages.head_in_layers().rows}
    assert heads["llama-3-8b"] > 2 > 1 > heads["llama-2-7b"]
