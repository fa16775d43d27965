"""The picture and tables of the page on stages are of stages that ranks have made."""

import re

import pytest

from xtrain.schedules import SCHEDULES
from xtrain_docs.lectures.lc5 import stages

BOX = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="18"'
MODEL = (
    "xtrain.model.stages:make_modules",
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
)


@pytest.mark.verifies(*MODEL)
def test_the_ranks_hold_the_stages_of_their_placement(on_ranks):
    for schedule in stages.PLACEMENTS:
        made = SCHEDULES[schedule](4, 8)
        found = stages.held(schedule)
        for rank, held in enumerate(found):
            assert [of["stage"] for of in held] == list(made.stages_of(rank))
        parameters = [stages.parameters_of_rank(schedule, rank) for rank in range(4)]
        assert sum(parameters) == pytest.approx(made.parameter_copies)
        flops = [stages.flops_of_rank(schedule, rank) for rank in range(4)]
        assert sum(flops) == pytest.approx(1)
        parts = [of["parts"] for held in found for of in held]
        numbers = sorted(n for part in parts for n in range(*part))
        assert numbers == sorted([*range(34)] * made.parameter_copies)


def test_a_box_of_the_picture_for_every_part_of_every_stage(on_ranks):
    drawn = stages.stages_of_a_model()
    copies = [SCHEDULES[s](4, 8).parameter_copies for s in stages.PLACEMENTS]
    assert drawn.count("<rect") == 34 * sum(copies)
    rights = [float(x) + float(wide) for x, wide in re.findall(BOX, drawn)]
    assert max(rights) < stages.WIDTH - 7
    assert "DualPipe: rank 3 holds stage 0 and stage 3" in drawn


@pytest.mark.verifies("xtrain.model.stages:part_costs")
def test_a_cut_by_cost_is_never_slower_and_the_head_costs_layers():
    for parts in (2, 4, 8, 16):
        assert 1 <= stages.slowest_stage(parts) < stages.slowest_stage(parts, True)
    assert stages.head_in_layers("llama-3-8b") > 2
    assert stages.head_in_layers("llama-2-7b") < 1
