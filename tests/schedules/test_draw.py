"""A timeline drawn: for a page, for a terminal, from the command line."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from xtrain.cli import main
from xtrain.schedules import (
    SCHEDULES,
    dualpipe,
    interleaved,
    one_f_one_b,
    render_svg,
    render_text,
    simulate,
    zb_h1,
)

NAMESPACE = "{http://www.w3.org/2000/svg}"


def cells(drawing):
    """(row, left, right, what) of every cell of a drawing, left to right."""
    found = []
    for rect in ElementTree.fromstring(drawing).iter(f"{NAMESPACE}rect"):
        title = rect.find(f"{NAMESPACE}title")
        if title is not None:
            x, y, w = (float(rect.get(name)) for name in ("x", "y", "width"))
            found.append((y, x, x + w, title.text))
    return found


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.verifies("xtrain.schedules.draw:render_svg")
def test_every_action_is_a_cell_as_long_as_it_took(name):
    timeline = simulate(SCHEDULES[name](4, 8), 1.0, 1.25, 0.5)
    drawn = cells(render_svg(timeline))
    expected = []
    for actions, starts, ends in zip(
        timeline.schedule.actions, timeline.starts, timeline.ends, strict=True
    ):
        for action, start, end in zip(actions, starts, ends, strict=True):
            expected += [(str(part), end - start) for part in action.parts]
    assert sorted(what for *_, what in drawn) == sorted(what for what, _ in expected)
    scales = {
        what: (right - left) / length
        for (_, left, right, what), (same, length) in zip(
            sorted(drawn, key=lambda c: c[3]), sorted(expected), strict=True
        )
        if what == same
    }
    assert max(scales.values()) == pytest.approx(min(scales.values()), rel=0.05)


def test_cells_of_a_rank_do_not_overlap_and_a_pair_shares_one_place():
    drawn = cells(render_svg(simulate(dualpipe(4, 8))))
    rows = {}
    for y, left, right, _ in drawn:
        rows.setdefault(int(y - 8) // 32, set()).add((left, right))
    assert len(rows) == 4
    for row in rows.values():
        for (_, end), (start, _) in pairwise(sorted(row)):
            assert start >= end - 0.2
    tops = {y for y, *_ in drawn}
    assert len(tops) == 8, "each of 4 rows has a lower half for the backwards of pairs"


def test_numbers_are_left_out_where_they_have_no_room():
    many = render_svg(simulate(one_f_one_b(2, 400)))
    few = render_svg(simulate(one_f_one_b(2, 4)))
    numbers = [len(re.findall(r'class="[np]"', drawing)) for drawing in (few, many)]
    assert numbers[0] == 16
    assert numbers[1] < 2 * 800


def test_drawings_at_one_scale_are_as_wide_as_their_steps_are_long():
    timelines = [simulate(made(4, 8)) for made in (one_f_one_b, zb_h1)]
    for timeline in timelines:
        drawn = cells(render_svg(timeline, scale=20))
        assert max(right for _, _, right, _ in drawn) - min(
            left for _, left, _, _ in drawn
        ) == pytest.approx(20 * timeline.makespan, abs=0.2)
    for scale in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale=.* above 0"):
            render_svg(timelines[0], scale=scale)


def test_cells_are_as_wide_as_their_stages_cost_and_a_tiny_one_widens_nothing():
    times = [0.01, 1, 2, 1]
    timeline = simulate(one_f_one_b(4, 8), times, times, times)
    drawn = cells(render_svg(timeline))
    wide = {what: right - left for _, left, right, what in drawn}
    assert wide["2F0"] == pytest.approx(2 * wide["1F0"], abs=0.2)
    assert wide["1F0"] > 9 > 1 > wide["0F0"]
    assert max(right for _, _, right, _ in drawn) < 2000
    assert "F0" in render_text(timeline)


def test_a_drawing_has_a_title_that_is_escaped():
    drawing = render_svg(simulate(one_f_one_b(2, 2)), title="a < b & c")
    root = ElementTree.fromstring(drawing)
    assert root.find(f"{NAMESPACE}title").text == "a < b & c"


@pytest.mark.verifies("xtrain.schedules.draw:render_text")
def test_the_table_of_the_terminal_shows_when_everything_begins():
    lines = render_text(simulate(zb_h1(3, 3))).splitlines()
    assert lines[0] == "rank 0   F0 F1 F2 ......B0 W0 B1 W1 B2 W2"
    assert lines[2] == "rank 2   ......F0 B0 F1 B1 F2 B2 W0 W1 W2"
    pair = render_text(simulate(dualpipe(2, 4)))
    assert "F1&B2" in pair
    chunks = render_text(simulate(interleaved(2, 2)))
    assert "2F0" in chunks and "3BW1" in chunks


@pytest.mark.verifies("xtrain.cli.schedule:run")
def test_the_command_prints_draws_and_hands_out_data(capsys, tmp_path):
    file = tmp_path / "a.svg"
    words = ["schedule", "zb-h1", "--stages", "4", "--micro-batches", "8"]
    assert main([*words, "--svg", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "F0 F1 F2 F3 .........B0 W0" in shown
    assert re.search(r"time of the step +27\n", shown)
    assert re.search(r"idle, per rank +3 2 1 0\n", shown)
    assert ElementTree.parse(file).getroot().tag == f"{NAMESPACE}svg"
    assert main([*words, "--json", "--p2p", "0.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["makespan"] == simulate(zb_h1(4, 8), p2p=0.5).makespan
    assert data["actions"][0][0] == {"action": "0F0", "start": 0.0, "end": 1.0}
