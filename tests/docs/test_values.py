"""Numbers: computed, formatted, and every unknown name stops the build."""

import pytest

from tests.docs.rendering import render
from xtrain_docs import guards
from xtrain_docs.values import ValuesError, evaluate


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 * 3 / 4 * 64 * MiB | bytes", "96 MiB"),
        ("1536 | bytes", "1.5 KiB"),
        ("512 | bytes", "512 bytes"),
        ("62.4e9 | si('B/s')", "62.4 GB/s"),
        ("0.755 | percent", "76 %"),
        ("0.755 | percent(1)", "75.5 %"),
        ("1.75 | times", "1.75x"),
        ("0.0042 | seconds", "4.2 ms"),
        ("5e-6 | seconds", "5 us"),
        ("1234567", "1 234 567"),
        ("7 / 4", "1.75"),
        ("2 ** 10", "1024"),
        ("'ring'", "ring"),
        ("len([n for n in range(5)])", "5"),
        ("max(2 * KiB * n for n in range(3)) | bytes", "4 KiB"),
        ("ceil_of(2)", None),
    ],
)
def test_expressions(expression, text):
    if text is None:
        with pytest.raises(ValuesError, match="ceil_of"):
            evaluate(expression)
    else:
        assert evaluate(expression) == text


def test_a_formula_of_the_planner():
    traffic = 'collective_traffic("ring_all_reduce", 1024, 4).max_sent'
    assert evaluate(f"{traffic} * 4 | bytes") == "6 KiB"


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("no_such_name", "no_such_name"),
        ("1 | no_such_filter", "no filter 'no_such_filter'"),
        ("1 +", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("[1, 2]", "not a number"),
        ("1 == 1", "is a bool"),
        ("__import__('os')", "__import__"),
    ],
)
def test_what_cannot_be_computed_stops_the_build(expression, why):
    with pytest.raises(ValuesError, match=why.replace("(", r"\(")):
        render(f"So {{{{ {expression} }}}} it is.")


def test_on_a_page_the_number_says_how_it_was_computed():
    out = render("It sends {{ 3 * MiB | bytes }}.")
    assert 'title="computed: 3 * MiB as bytes"' in out
    assert '<span class="xt-value" tabindex="0" ' in out
    assert ">3 MiB</span>" in out


def test_within_a_link_the_link_alone_takes_the_focus():
    out = render(
        "It sends {{ 1 }} or [{{ 2 }} of {{ [1, 2, 3][2] }}, [a] {{ 4 }}](x.md)."
    )
    assert out.count("tabindex") == 1
    assert out.count("xt-value") == 4
    assert "tabindex" not in out.partition("<a")[2]


def test_in_math_and_headings_the_number_stands_bare():
    assert "<mn>12</mn>" in render("$x = {{ 3 * 4 }}$")
    assert "xt-value" not in render("## {{ 3 * 4 }} things")


def test_code_is_left_alone():
    assert "{{ x }}" in render("`{{ x }}`")
    assert "{{ x }}" in render("```text\n{{ x }}\n```")


def test_in_a_table():
    out = render("| a |\n| - |\n| {{ 3 * MiB | bytes }} |\n")
    assert "3 MiB" in out
    assert "<td>" in out


def test_cited_and_given():
    assert '<span class="xt-cited"' in render("It took [5 ms]{.cited}.")
    assert '<span class="xt-given"' in render("A link of [50 GB/s]{.given}.")


ROWS = """```rows for n in (2, 3)
for double in [2 * n]
| ranks | twice |
| --- | ---: |
| {{ n }} | {{ double / 2 * MiB | bytes }} |
The caption {{ 1 + 1 }}.
```"""


def test_rows_are_computed_for_every_value():
    out = render(ROWS)
    assert out.count("<tr>") == 3
    assert ">2\u00a0MiB</span>" in out and ">3\u00a0MiB</span>" in out
    assert 'title="computed: double / 2 * MiB as bytes for double = 6"' in out
    assert '<p class="xt-caption">The caption <span' in out


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("(2, 3)", "(2, 3", "SyntaxError"),
        ("(2, 3)", "nowhere", "nowhere"),
        ("{{ n }}", "{{ m }}", "'m' is not defined"),
    ],
)
def test_rows_that_cannot_be_computed_stop_the_build(old, new, why):
    with pytest.raises(ValuesError, match=why):
        render(ROWS.replace(old, new))


def test_rows_need_no_caption():
    out = render(ROWS.replace("The caption {{ 1 + 1 }}.\n", ""))
    assert out.count("<tr>") == 3 and "xt-caption" not in out


def test_numbers_typed_into_rows_are_found():
    assert guards.typed_numbers(ROWS) == []
    assert guards.typed_numbers(ROWS.replace("{{ n }}", "2 ms")) == [
        "line 5: typed by hand: '2 ms'"
    ]
