"""Pictures, tables and numbers of lc5 that are of schedules as they are played."""

import re
from xml.etree import ElementTree

import pytest

from xtrain.plan import pipeline_activations, pipeline_idle
from xtrain.schedules import SCHEDULES, simulate
from xtrain_docs.blocks import registry
from xtrain_docs.lectures.lc5 import common, index, runner
from xtrain_docs.lectures.lc5.common import held_by, idle_of, messages_of, step_of
from xtrain_docs.lectures.lc5.errata import units_of_pair, waited

SVG = "{http://www.w3.org/2000/svg}"
FORMS = [name for name in SCHEDULES if name != "dualpipe_simple"]


def cells(drawing):
    """What each cell of a timeline says it is."""
    titles = [
        rect.find(f"{SVG}title")
        for rect in ElementTree.fromstring(drawing).iter(f"{SVG}rect")
    ]
    return sorted(title.text for title in titles if title is not None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_has_a_cell_for_every_action_of_the_schedule(name):
    schedule = SCHEDULES[name](4, 8)
    parts = [p for row in schedule.actions for a in row for p in a.parts]
    assert cells(common.schedule_timeline(name, 4, 8)) == sorted(map(str, parts))


def test_all_timelines_of_the_overview_have_one_scale_and_one_amount_of_work():
    drawn = index.schedules_at_one_scale(4, 8)
    widths = [float(w) for w in re.findall(r'viewBox="0 0 (\d+)', drawn)]
    steps = [float(t) for t in re.findall(r"<p [^>]*>[^<]*: ([\d.]+)</p>", drawn)]
    assert len(widths) == len(steps) == len(SCHEDULES) == len(common.TITLES)
    margin = widths[0] - steps[0] * index.STAGE_PIXELS
    for width, step in zip(widths, steps, strict=True):
        assert width - step * index.STAGE_PIXELS == pytest.approx(margin, abs=1)


def test_the_comparison_is_what_is_played():
    table = index.schedules_compared()
    assert [row[0].split("]")[0][1:] for row in table.rows] == list(SCHEDULES)
    for (name, _, m, _), row in zip(index.COMPARED, table.rows, strict=True):
        timeline = simulate(SCHEDULES[name](8, m))
        assert row[2] == f"{100 * timeline.idle_fraction:.1f} %"
        assert row[3] == f"{timeline.makespan / timeline.work:.3f}"
        assert float(row[4]) == max(timeline.peak_activations)
        assert float(row[5]) == max(timeline.peak_until_weights)
        assert row[6] == str(timeline.parameter_copies)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.verifies(
    "xtrain.plan.bubble:pipeline_idle", "xtrain.plan.bubble:pipeline_activations"
)
def test_the_planners_forms_are_what_is_played(name, ranks):
    m = ranks if name == "chimera" else 4 * ranks
    timeline = common.played(name, ranks, m)
    chunks = timeline.schedule.chunks
    assert max(timeline.idle) == pytest.approx(pipeline_idle(name, ranks))
    held = pipeline_activations(name, ranks, m, chunks)
    assert max(timeline.peak_activations) == pytest.approx(held)


@pytest.mark.parametrize("times", [(1, 1.3, 0.9), (1, 1.2, 0.8), (2, 1, 1)])
def test_the_form_of_chimera_holds_for_uneven_times(times):
    found = simulate(SCHEDULES["chimera"](8, 8), *times)
    assert max(found.idle) == pytest.approx(pipeline_idle("chimera", 8, *times))


# errata and questions -----------------------------------------------------------------


def test_exchanges_are_hidden_in_pairs_only():
    # 9 of 20 and 69 of 80 are in pairs, which compute for 3
    assert [waited("dualpipe", 8, 20, x) for x in (1, 3)] == [22, 93]
    assert [waited("one_f_one_b", 8, 20, x) for x in (1, 3)] == [40, 120]
    sizes = ("one_f_one_b", 8, 20)
    assert (idle_of(*sizes), step_of(*sizes), step_of(*sizes, 1.0)) == (21, 81, 135)
    assert idle_of("dualpipe", 8, 20) == 6


def test_chunks_divide_the_idle_time_and_multiply_the_messages():
    chunks = (1, 2, 4)
    assert [idle_of("interleaved", 4, 8, v) for v in chunks] == [9, 4.5, 2.25]
    assert [messages_of("interleaved", 4, 8, v) for v in chunks] == [6, 14, 30]
    assert messages_of("zb_v", 4, 8) == 12  # the turn of a V is no message


def test_the_tables_of_a_pair():
    table = registry("table")["order_of_a_pair"]
    assert len(table().rows) == 4
    assert table("two_forwards").rows[-1] == ["", "F(combine) of 1"]


def test_numbers_of_spoken_answers():
    assert [held_by("one_f_one_b", 8, 24, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert [held_by("zb_h1", 8, 24, 7, until) for until in "BW"] == [1, 8]
    # attention, MLP and two exchanges of each micro-batch, one after the other or not
    orders = ("pair", "two_forwards", "two_backwards")
    assert [units_of_pair(order, in_turn=True) for order in orders] == [8, 8, 8]
    assert [units_of_pair(order) for order in orders] == [4, 5, 5]


# the picture of the runner ------------------------------------------------------------


def test_the_picture_has_every_action_and_an_arrow_for_every_message():
    drawing = runner.runner_executed(ranks=2, micro_batches=2)
    assert drawing.count("<rect") == 2 * 2 * 2
    assert drawing.count("<line") == 3 * 2 * 2
    for words in ("0F0", "1BW1", "1REDUCE", "rank 1"):
        assert f">{words}<" in drawing


def test_a_receive_is_drawn_after_its_send():
    places = runner.placed([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]])
    assert places[1, 0][0] > places[0, 1][0] > places[0, 0][0]
