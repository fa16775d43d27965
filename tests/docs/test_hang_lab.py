"""The hang lab's page: what a job left, a form that knows the answer, the answer."""

import html
import re

import pytest

from tests.docs.rendering import render
from xtrain.practice.hang_lab import lab


@pytest.fixture(scope="module")
def sections() -> list[str]:
    page = render("```table hang_lab\n```")
    head, *found = page.split("<div data-search-exclude")
    assert 'href="../../assets/drill.css"' in head and "<p><" not in head
    return found


def test_each_job_is_there_and_its_answer_is_folded(sections):
    assert len(sections) == len(lab.faults())
    for number, (one, text) in enumerate(zip(lab.faults(), sections, strict=True), 1):
        assert f'<h3 id="{one.job}">{number}. {one.title}</h3>' in text
        before, rest = text.split('<details class="success">')
        answer, _ = rest.split("</details>")
        plain = html.unescape(re.sub("<[^>]+>", "", before))
        assert lab.output(one) in plain and lab.calls(one) in plain
        assert f"def {one.job}" not in plain and "??? " not in text
        plain = html.unescape(re.sub("<[^>]+>", "", answer))
        assert lab.report(one) in plain and one.source in plain


def test_a_form_judges_as_the_command_does(sections):
    for one, text in zip(lab.faults(), sections, strict=True):
        assert re.search(r'<form class="xt-desk"[^>]* hidden', text)
        assert f'data-call="{one.call}"' in text
        (wrong,) = re.findall(r'<form[^>]* data-wrong="([^"]+)"', text)
        other = "none" if one.call != "none" else "send"
        assert html.unescape(wrong) == lab.judge(one, one.rank, other).words
        ranks, calls = re.findall(r"<select name=.*?</select>", text)
        options = re.findall(r'<option value="(\w+)"(?: data-wrong="(.+?)")?>', ranks)
        assert [rank for rank, _ in options] == list(lab.RANKS)
        for rank, words in options:
            right = lab.judge(one, rank, one.call.split()[0])
            assert (not words) == right.right
            assert right.right or html.unescape(words) == right.words
        assert re.findall(r'<option value="(\w+)">', calls) == list(lab.CALLS)
