"""The page on how a cluster works: its figures and its formulas are of its programs."""

import re

import pytest

from xtrain_docs import config
from xtrain_docs.lectures.cluster import one_process

PROGRAMS = config.ROOT / "snippets/cluster"
MESSAGE = 2 * (5e-6 + 4e6 / 50e9)


def test_the_formulas_give_what_the_program_prints() -> None:
    printed = (PROGRAMS / "two_nodes.out").read_text()
    one, two = map(float, re.findall(r"after ([\d.]+) us", printed))
    assert one_process.step_seconds() * 1e6 == pytest.approx(two, abs=0.05)
    assert one_process.step_seconds("messages") == pytest.approx(MESSAGE)
    in_node = one_process.step_seconds() - one_process.step_seconds("messages")
    assert in_node * 1e6 == pytest.approx(one, abs=0.05)


@pytest.mark.parametrize(
    ("draw", "ranks", "last"),
    [("draw_three_ranks", 3, "42 us"), ("draw_two_nodes", 16, "223 us")],
)
def test_the_figures_are_of_the_programs(draw, ranks, last) -> None:
    svg = getattr(one_process, draw)()
    assert f"{ranks} ranks, {last}" in svg
    assert 'class="message"' in svg and 'class="wait"' in svg
