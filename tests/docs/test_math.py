"""TeX becomes MathML at build time; what cannot be set stops the build."""

import pytest

from tests.docs.rendering import render
from xtrain_docs.math import MathError, mathml


def test_inline_and_display():
    out = render("Sends $2\\frac{N-1}{N}M$.\n\n$$\nT = 2(N-1)\\alpha\n$$\n")
    assert out.count("<math") == 2
    assert 'display="block"' in out
    assert "<mfrac>" in out
    assert "$" not in out.replace("alttext", "")


@pytest.mark.parametrize(
    "tex", [r"\foo{x}", r"\frac{a", r"a_{", r"\frac{a}", r"\sqrt", r"x^"]
)
def test_bad_tex_stops_the_build(tex):
    with pytest.raises(MathError):
        render(f"Here ${tex}$ it is.")


def test_a_display_never_closed():
    with pytest.raises(MathError, match="never closed"):
        render("$$\nx = 1\n\nand text\n")


def test_upright_words_are_one_identifier():
    assert "<mi>time</mi>" in mathml(r"\mathrm{time}")


@pytest.mark.parametrize(
    "text", ["It costs 5 $ or 6 $ here.", "`$x$`", "```text\n$x$\n```", r"\$x\$"]
)
def test_dollars_that_are_not_math(text):
    assert "<math" not in render(text)


def test_in_a_table_and_a_list():
    out = render("| a | b |\n| - | - |\n| $N-1$ | x |\n\n- $\\alpha$\n")
    assert out.count("<math") == 2
