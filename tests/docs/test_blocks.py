"""Figures, tables and traces called by name."""

import re
import xml.etree.ElementTree as ET

import pytest

from tests.docs.rendering import render
from xtrain_docs import blocks, figures, tables
from xtrain_docs.svg import Axis, bar_chart, beside, line_chart
from xtrain_docs.tables import Table


@pytest.fixture
def registered(monkeypatch):
    """A figure and a table that only these tests know."""

    def toy_figure(ranks: int = 2) -> str:
        return line_chart(
            {"a & b": [(1, 1), (2, ranks)]}, Axis("x"), Axis("y"), "A < B", "It grows."
        )

    def toy_table(rows: int = 1) -> Table:
        return Table(["name", "$n$"], [["`a|b`", str(i)] for i in range(rows)], "lr")

    monkeypatch.setitem(figures.REGISTRY, "toy_figure", toy_figure)
    monkeypatch.setitem(tables.REGISTRY, "toy_table", toy_table)


def test_a_figure_is_inline_svg_with_a_name(registered):
    out = render("```figure toy_figure ranks=3\nThe *caption*.\n```\n")
    svg = re.search(r"<svg.*?</svg>", out, re.S)[0]
    assert ET.fromstring(svg).get("aria-label") == "A < B. It grows."
    assert "<figcaption>The <em>caption</em>.</figcaption>" in out.replace("\n", "")
    assert "wzxhzdk" not in out


def test_a_table_is_markdown_so_math_and_code_work(registered):
    out = render("```table toy_table rows=2\nCaption.\n```\n")
    assert out.count("<tr>") == 3
    assert "<code>a|b</code>" in out
    assert "<math" in out


def test_in_a_table_a_number_and_its_unit_stay_on_one_line():
    words = ["16 MiB", "`16 MiB`", "4 ranks", "4 steps", "2 to 3 ms, 5 %", "1 GB/s"]
    (*_, line) = Table(["x"] * 6, [words]).markdown()
    held = line.replace("\u00a0", "_").strip("| ").split(" | ")
    assert held == ["16_MiB", words[1], words[2], words[3], "2 to 3_ms, 5_%", "1_GB/s"]


def test_a_caption_has_computed_numbers(registered):
    for kind, name in (("figure", "toy_figure"), ("table", "toy_table rows=2")):
        words = "Of {{ 3 * MiB | bytes }}, `{{ x }}` as it is."
        out = render(f"```{kind} {name}\n{words}\n```\n")
        assert 'title="computed: 3 * MiB as bytes">3 MiB</span>' in out
        assert "<code>{{ x }}</code>" in out
    with pytest.raises(blocks.values.ValuesError, match="no_such"):
        render("```figure toy_figure\n{{ no_such }}\n```\n")


def test_inside_raw_html_and_boxes(registered):
    out = render(
        '<div class="x" markdown="1">\n\n```figure toy_figure\n```\n\n</div>\n\n'
        "!!! note\n\n    ```figure toy_figure\n    ```\n"
    )
    assert out.count("<svg") == 2
    assert "wzxhzdk" not in out


def test_the_map_links_lectures_and_the_pages_that_they_have(toy):
    toy.write("docs/en/bugs/lc2.md", "# Bugs\n")
    out = render(
        '<div class="xt-map" markdown="1">\n\n```table lecture_map\n```\n\n</div>'
    )
    assert '<a href="lc2-data-parallel/index.md">Data parallel</a>' in out
    assert '<a href="bugs/lc2.md">Bugs</a>' in out
    assert out.count("<a ") == 8 + 1


@pytest.mark.parametrize(
    ("fence", "why"),
    [
        ("figure no_such_figure", "no figure 'no_such_figure'; there are:.*toy_figure"),
        ("figure toy_figure colour=3", "unexpected keyword argument 'colour'"),
        ("figure toy_figure ranks", "not of the form key=value"),
        ("figure", "needs the name"),
        ("table no_such_table", "no table"),
        ("trace no_such_trace", "no trace"),
    ],
)
def test_slips_stop_the_build(registered, fence, why):
    with pytest.raises(blocks.BlockError, match=why):
        render(f"```{fence}\n```\n")


def test_two_functions_of_one_name_are_refused():
    registry = blocks.Registry("figure")

    def same() -> str:
        return ""

    registry(same)
    other = type(same)(same.__code__, {}, "same")
    other.__module__ = "elsewhere"
    with pytest.raises(blocks.BlockError, match="two figures"):
        registry(other)


# --- charts ---------------------------------------------------------------------------


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The polylines of a chart, in pixels."""
    return [
        [tuple(map(float, p.split(","))) for p in line.split()]
        for line in re.findall(r'<polyline points="([^"]+)"', svg)
    ]


def test_a_power_law_is_straight_on_logarithmic_axes():
    data = [(2.0**i, 3.0 * 4.0**i) for i in range(6)]
    svg = line_chart({"p": data}, Axis("x", "log2"), Axis("y", "log"), "t")
    (line,) = points(svg)
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(line, line[1:], strict=False)
    ]
    assert max(slopes) - min(slopes) < 0.01
    assert line[0][1] > line[-1][1]  # larger is higher up


def test_a_reference_line_runs_under_the_numbers_of_bars():
    bars = {"a": {"ours": 1.0}, "b": {"ours": 2.0}}
    drawing = bar_chart(bars, Axis("x"), "t", reference=(1.2, "torch"))
    mark = drawing.index('class="xt-mark"')
    numbers = [found.start() for found in re.finditer("xt-value-text", drawing)]
    assert len(numbers) == 2
    assert mark < min(numbers)
    assert mark > drawing.rindex("xt-bar-fill")


def test_a_number_keeps_off_the_reference_line():
    bars = {"a": {"ours": 0.9}, "b": {"ours": 0.2}, "c": {"ours": 2.0}}
    drawing = bar_chart(bars, Axis("x"), "t", reference=(1.0, "torch"))
    (mark,) = re.findall(r'<line x1="([\d.]+)"[^>]*class="xt-mark"', drawing)
    numbers = re.findall(
        r'<text x="([\d.]+)"[^>]*class="xt-value-text"[^>]*>([^<]+)', drawing
    )
    assert len(numbers) == 3
    for x, words in numbers:
        ends = float(x) + 7.4 * len(words)
        assert float(x) >= float(mark) + 6 or ends <= float(mark), words


def test_a_number_stands_beside_its_bar_and_behind_strokes_in_its_way():
    assert beside(100, [], 40) == 108
    assert beside(100, [50, 300], 40) == 108
    assert beside(100, [120, 140], 40) == 148


def test_bars_are_as_long_as_their_values():
    svg = bar_chart({"a": {"ours": 1.0}, "b": {"ours": 2.0}}, Axis("x", high=2), "t")
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', svg)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def test_charts_refuse_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="logarithmic"):
        line_chart({"a": [(0, 1), (1, 2)]}, Axis("x", "log"), Axis("y"), "t")
    with pytest.raises(ValueError, match="without points"):
        line_chart({"a": []}, Axis("x"), Axis("y"), "t")


def test_labels_do_not_lie_on_each_other():
    series = {f"s{i}": [(0, 0), (1, 1 + i / 1000)] for i in range(4)}
    svg = line_chart(series, Axis("x"), Axis("y"), "t", width=150)
    found = re.findall(r'x="([\d.]+)" y="([\d.]+)" class="xt-name', svg)
    places = sorted((float(y), float(x)) for x, y in found)
    assert len(places) == 4
    assert len({y for y, _ in places}) > 1  # more rows than one
    for (y, x), (below, right) in zip(places, places[1:], strict=False):
        assert below - y >= 15 or right - x >= 7 * len("s0") + 15


def test_equal_input_gives_equal_bytes():
    make = lambda: line_chart({"a": [(1, 2), (3, 4)]}, Axis("x"), Axis("y"), "t")  # noqa: E731
    assert make() == make()


def test_what_belongs_to_a_lecture_is_counted_and_linked(toy):
    toy.write(
        "docs/en/interview/lc1.md", '??? question "Why?"\n\n??? question "How?"\n'
    )
    toy.write("docs/en/bugs/lc1.md", "# B\n\n## A {#b01}\n\n## Shape {#shape}\n")
    toy.write("docs/en/benchmarks/lc1.md", "# R\n")
    out = render("```table lecture_links lecture=lc1\n```")
    assert '<a href="/interview/lc1.md">2 questions</a>' in out
    assert '<a href="/bugs/lc1.md">1 classic bug</a>' in out
    assert '<a href="/benchmarks/lc1.md">races</a>' in out
    assert '<a href="/benchmarks/backends.md">backends</a>' in out
    assert "errata" not in out.lower()


def test_a_lecture_with_nothing_beside_it_stops_the_build(toy):
    with pytest.raises(ValueError, match="lc9"):
        render("```table lecture_links lecture=lc9\n```")
