"""Pictures and tables of the lc5 pages are what is played."""

import re
from xml.etree import ElementTree

import pytest

from xtrain.plan import pipeline_activations, pipeline_idle
from xtrain.schedules import SCHEDULES, simulate
from xtrain_docs.lectures.lc5 import common, index

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
