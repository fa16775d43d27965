"""The page "On a whiteboard" has every form, with its own words and its download."""

import base64
import re

import pytest

from xtrain.copying import whiteboard
from xtrain.copying.forms import MOST_LINES, forms, lines_of_code
from xtrain.practice.drills import drill
from xtrain_docs import config
from xtrain_docs.tables.whiteboard import (
    OVERVIEW,
    anchor_above,
    shown_on,
    whiteboard_forms,
    whiteboard_links,
)

FORMS = forms()
PAGE = (config.PAGES / OVERVIEW).read_text()
SECTION = re.compile(r"^### (\w+) \{#(\w+)\}\n\n```table (.+)\n```\n\n(.+)\n", re.M)
SECTIONS = {match[1]: match for match in SECTION.finditer(PAGE)}


def test_every_form_has_its_section_and_its_folder_a_table():
    assert set(SECTIONS) == set(FORMS)
    assert len(re.findall(r"^### ", PAGE, re.M)) == len(FORMS)
    folders = {file.parent.name for file in FORMS.values()}
    assert set(re.findall(r'whiteboard_forms folder="(\w+)"', PAGE)) == folders


@pytest.mark.parametrize("name", FORMS)
def test_what_to_say_is_three_to_five_sentences(name):
    _, anchor, table, words = SECTIONS[name].groups()
    assert anchor == name
    assert table == f'whiteboard_links name="{name}"'
    assert 3 <= len(re.findall(r"[.?](?= [A-Z$]|$)", words)) <= 5, words


def test_a_row_says_what_the_header_says():
    seen = set()
    for folder in {file.parent.name for file in FORMS.values()}:
        for row in whiteboard_forms(folder).rows:
            link, minutes, difficulty, lines, sends, leaves_out = row
            name = re.fullmatch(r"\[`(\w+)`\]\(#\1\)", link)[1]
            text = FORMS[name].read_text()
            assert FORMS[name].parent.name == folder
            one = drill(name)
            assert int(minutes) == one.minutes
            assert (difficulty.count("★"), len(difficulty)) == (one.difficulty, 5)
            assert int(lines) == lines_of_code(text) <= MOST_LINES
            words = " ".join(text.split())  # also of the lines that go on
            for field, said in (("Sends", sends), ("Leaves out", leaves_out)):
                assert f"{field}: {said}" in words and said.endswith(".")
            seen.add(name)
    assert seen == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_the_download_is_the_form_with_its_self_check(name):
    (line,) = whiteboard_links(name)
    packed = re.search(r"data:text/x-python;base64,([\w+/=]+)", line)[1]
    assert base64.b64decode(packed).decode() == whiteboard(name)
    page = shown_on(FORMS[name])
    assert page != OVERVIEW
    assert (page is None) == ("[the code]" not in line)


def test_the_section_that_shows_a_form_is_found(monkeypatch):
    file = FORMS["ring_all_reduce"]
    reference = "src/xtrain/whiteboard/comm/ring_all_reduce.py"
    ring = config.PAGES / "lc1-communication" / "ring-all-reduce.md"
    pages = [config.PAGES / OVERVIEW, ring]
    monkeypatch.setattr("xtrain_docs.authored.references", lambda: {reference: pages})
    assert shown_on(file) == "lc1-communication/ring-all-reduce.md#whiteboard"
    assert shown_on(FORMS["broadcast"]) is None
    (line,) = whiteboard_links("ring_all_reduce")
    write = "[write it in the page](practise.md#ring_all_reduce)"
    assert line.startswith(
        f"[the code]({shown_on(file)}) \u00b7 {write} \u00b7 [download"
    )
    (line,) = whiteboard_links("zero_1")
    assert "practise.md" not in line


def test_the_heading_above_an_embedded_file_is_its_anchor():
    text = '# A {#a}\n## B\n## C {#c}\n```\n--8<-- "x.py"\n```\n## D {#d}\n'
    assert anchor_above(text, "x.py") == "#c"
    assert anchor_above('# A\n--8<-- "x.py"\n', "x.py") == ""
