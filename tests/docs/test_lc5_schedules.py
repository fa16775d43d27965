"""Pictures and tables of the lc5 pages are what is played, or stop the build."""

import re
from xml.etree import ElementTree

import pytest

from xtrain.schedules import SCHEDULES, simulate
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import counted, figures, published, tables
from xtrain_docs.tables import REGISTRY

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
    assert cells(figures.schedule_timeline(name, 4, 8)) == sorted(map(str, parts))


def test_all_timelines_of_the_overview_have_one_scale_and_one_amount_of_work():
    drawn = figures.schedules_at_one_scale(4, 8)
    widths = [float(w) for w in re.findall(r'viewBox="0 0 (\d+)', drawn)]
    steps = [float(t) for t in re.findall(r"<p [^>]*>[^<]*: ([\d.]+)</p>", drawn)]
    assert len(widths) == len(steps) == len(SCHEDULES) == len(figures.TITLES)
    margin = widths[0] - steps[0] * figures.STAGE_PIXELS
    for width, step in zip(widths, steps, strict=True):
        assert width - step * figures.STAGE_PIXELS == pytest.approx(margin, abs=1)
    works = [figures.same_model(name, 4, 8).work for name in figures.TITLES]
    assert works == [24] * len(works)


def test_the_chart_of_idle_shares_has_a_line_for_each_schedule():
    drawn = figures.bubble_by_micro_batches(4, 32)
    for name in ("1F1B", "Interleaved 1F1B", "ZB-H1", "ZB-H2", "DualPipe"):
        assert name in drawn


def test_the_comparison_is_what_is_played():
    table = tables.schedules_compared()
    assert [row[0].split("]")[0][1:] for row in table.rows] == list(SCHEDULES)
    for (name, ranks, m, chunks, _), row in zip(
        tables.COMPARED, table.rows, strict=True
    ):
        options = {} if chunks is None else {"chunks": chunks}
        timeline = simulate(SCHEDULES[name](ranks, m, **options))
        assert row[2] == f"{100 * timeline.idle_fraction:.1f} %"
        assert row[3] == f"{timeline.makespan / timeline.work:.3f}"
        assert float(row[4]) == max(timeline.peak_activations)
        assert float(row[5]) == max(timeline.peak_until_weights)
        assert row[6] == str(timeline.parameter_copies)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", ["pipeline_idle", "pipeline_activations"])
def test_a_form_that_disagrees_with_what_is_played_is_refused(name, form, monkeypatch):
    chunks = 2 if name == "interleaved" else None
    for row in tables.schedule_form(name, chunks=chunks).rows:
        assert row[3] == row[4] and row[6] == row[7]
    monkeypatch.setattr(tables, form, lambda *sizes: 1.5)
    with pytest.raises(EvidenceError, match=name):
        tables.schedule_form(name, chunks=chunks)


def wrong_simulate(schedule, *times, **options):
    """Played with other times than were asked for."""
    return simulate(schedule, 1.0, 1.2, 0.8)


TABLES = {
    "published_bubbles": (),
    "bubble_twice": (),
    "schedule_activations": (),
    "idle_at_times": ("zb_v", 8, 20, False),
    "dualpipe_steps": (),
    "messages_by_schedule": (),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_made(name):
    table = REGISTRY[name](*TABLES[name])
    assert table.rows
    assert table.markdown()


def another_schedule(name, *sizes, **options):
    return simulate(SCHEDULES["zb_h2" if name == "one_f_one_b" else "gpipe"](4, 8))


def test_a_table_whose_run_contradicts_it_is_refused(monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "simulate", wrong_simulate)
        for name in ("published_bubbles", "idle_at_times"):
            with pytest.raises(EvidenceError, match="said to be"):
                REGISTRY[name](*TABLES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "played", another_schedule)
        patch.setattr(counted, "played", another_schedule)
        for name in ("bubble_twice", "schedule_activations"):
            with pytest.raises(EvidenceError, match="said to be"):
                REGISTRY[name]()
    monkeypatch.setattr(counted, "with_messages", lambda schedule: schedule)
    with pytest.raises(EvidenceError, match="gpipe: played 0"):
        counted.messages_by_schedule()


def test_steps_that_do_not_add_up_to_the_actions_of_a_rank_are_refused():
    actions = SCHEDULES["dualpipe"](8, 20).actions[0]
    right = [6, 1, 3, 3, 3, 1, 3, 1]
    published.count_actions(actions, right, middle=False)
    for step in range(8):
        wrong = list(right)
        wrong[step] += 1
        with pytest.raises(EvidenceError):
            published.count_actions(actions, wrong, middle=False)


def test_published_rates_are_met_with_their_messages_only(monkeypatch):
    assert len(published.published_bubbles().rows) == 3
    without = tuple((*row[:4], 0.0, row[5]) for row in published.PUBLISHED)
    monkeypatch.setattr(published, "PUBLISHED", without)
    with pytest.raises(EvidenceError, match="one_f_one_b, 24 micro-batches"):
        published.published_bubbles()
