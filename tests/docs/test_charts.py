"""Charts of formulas: every series at every turn, and mistakes stop the build."""

import re

import pytest

from tests.docs.rendering import render
from xtrain_docs.values import ValuesError

CHART = """```chart for n in (1, 2, 4)
title: Two lines up to {{ 2 + 2 }}
note: Drawn <here>.
x: n, Axis("ranks", "log2", ticks=[1, 4])
y: Axis("time", "linear", as_seconds)
slow: n * ms
fast: n
  * us
mark: 2, "two"

The caption {{ 1 + 1 }}.
```"""


def test_a_chart_draws_every_series_at_every_turn():
    out = render(CHART)
    assert out.count("<polyline") == 2
    titles = re.findall(r"<title>(.*?)</title>", out)
    assert titles[0] == "Two lines up to 4"
    assert titles[1:] == [
        *("slow: 1, 1 ms", "slow: 2, 2 ms", "slow: 4, 4 ms"),
        *("fast: 1, 1 us", "fast: 2, 2 us", "fast: 4, 4 us"),
    ]
    assert "Drawn &lt;here&gt;." in out and ">two</text>" in out
    assert "<figcaption" in out and 'title="computed: 1 + 1"' in out


def test_none_leaves_a_point_out():
    out = render(CHART.replace("fast: n\n  * us", "fast: n * us if n > 1 else None"))
    assert out.count("<polyline") == 2
    assert out.count("<title>fast: ") == 2 and out.count("<title>slow: ") == 3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("n * ms", "n * hours", "'hours' is not defined"),
        ("(1, 2, 4)", "(1, 2, 4", "SyntaxError"),
        ("y: Axis", "z: Axis", "a chart without y"),
        ("n\n  * us", "0 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_drawn_stops_the_build(old, new, why):
    with pytest.raises(ValuesError, match=why):
        render(CHART.replace(old, new))
