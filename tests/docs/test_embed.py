"""Embedding by name: what is shown, and that every slip stops the build."""

import base64
import html
import re
import subprocess
import sys

import pytest

from tests.docs.rendering import render
from xtrain_docs import authored, excerpts, reference_pages, symbols, verification
from xtrain_docs.excerpts import EmbedError, Options
from xtrain_docs.symbols import SymbolError, resolve


def page(*lines: str, reference: str = "toy.ring:ring") -> str:
    return "\n".join(["```py", f'--8<-- "{reference}"', *lines, "```", ""])


def shown(toy, *lines: str, reference: str = "toy.ring:ring") -> str:
    """The code as a reader sees it."""
    toy.record(reference)
    code = re.search(
        r"<code>(.*?)</code>", render(page(*lines, reference=reference)), re.S
    )
    return html.unescape(re.sub(r"<[^>]+>", "", code[1])).strip("\n")


def test_shows_the_source_as_it_stands(toy):
    expected = symbols.resolve("toy.ring:ring").source
    assert shown(toy) == expected
    assert "one turn each" in expected


def test_an_edit_shows_without_touching_the_page(toy):
    path = toy.root / "src/toy/ring.py"
    path.write_text(path.read_text().replace("one turn each", "another remark"))
    assert "another remark" in shown(toy)


def test_leaves_the_docstring_out(toy):
    text = shown(toy, "doc: off")
    assert "Turn the values" not in text
    assert text.splitlines()[1].strip().startswith("for step")


def test_shows_one_statement_and_the_signature(toy):
    text = shown(toy, "show: for step in")
    assert text.splitlines()[0].startswith("def ring")
    assert "values[:] = shift" in text
    assert "return combine" not in text
    assert "# ..." in text


def test_shows_a_range(toy):
    text = shown(toy, "show: values[:] = @to return combine")
    assert "values[:]" in text
    assert "return combine" in text
    assert "one turn" not in text


def test_a_method_can_be_shown(toy):
    toy.record("toy.ring:Wheel")
    out = render(page(reference="toy.ring:Wheel.turn"))
    assert "turn" in out
    assert "Verified by 2 tests" in out


def test_highlights_and_notes(toy):
    toy.record("toy.ring:ring")
    out = render(
        page("hl: return combine", "note: for step in", "note: return combine")
    )
    assert 'class="hll"' in out
    assert '<span class="xt-note" data-n="1" role="img"' in out
    assert '<span class="c1"># one turn each</span>' in out
    assert '<span class="xt-note" data-n="2" role="img"' in out
    assert ")!" not in out


@pytest.mark.parametrize("key", ["hl", "note", "show"])
def test_text_must_occur_in_exactly_one_line(toy, key):
    toy.record("toy.ring:ring")
    with pytest.raises(EmbedError, match="occurs in 0 lines"):
        render(page(f"{key}: no such text"))
    with pytest.raises(EmbedError, match="occurs in [2-9] lines"):
        render(page(f"{key}: values"))


@pytest.mark.parametrize(
    ("reference", "lines", "why"),
    [
        ("toy.ring:ring", ["highlight: return"], "not an option"),
        ("toy.ring:rang", [], "has no 'rang'.*ring, Wheel"),
        ("toy.wring:ring", [], "no module 'toy.wring'"),
        ("toy:ring", [], "write 'toy.ring:ring'"),  # imported from there
    ],
)
def test_an_unknown_name_or_option_is_refused_with_what_there_is(
    toy, reference, lines, why
):
    with pytest.raises((EmbedError, SymbolError), match=why):
        render(page(*lines, reference=reference))


def test_nothing_is_imported(toy):
    toy.write("src/toy/bomb.py", "def f():\n    return 1\n\n\nraise SystemExit(3)\n")
    toy.record("toy.bomb:f")
    assert "return" in render(page(reference="toy.bomb:f"))


def test_the_bar_says_where_the_code_is_and_leads_to_the_reference(toy, monkeypatch):
    toy.record("toy.ring:ring")
    out = render(page())
    first = resolve("toy.ring:ring").first
    assert f'<code class="xt-path">toy/ring.py:{first}</code>' in out
    assert "toy.ring.ring" in out
    monkeypatch.setenv("XTRAIN_REPO_URL", "https://example.org/x/")
    link = 'href="https://example.org/x/blob/main/src/toy/ring.py#L9-L16"'
    assert link in render(page())


def test_a_private_name_has_no_reference_entry(toy):
    toy.record("toy.ring:_hidden")
    assert "xt-api" not in render(page(reference="toy.ring:_hidden"))


def test_a_method_without_words_of_its_own_leads_to_its_class():
    linear = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
    assert symbols.resolve(f"{linear}.forward").entry == linear.replace(":", ".")
    said = symbols.resolve("xtrain.model.decoder:XtrainModel.forward")
    assert said.entry == said.dotted == "xtrain.model.decoder.XtrainModel.forward"


def test_a_public_name_comes_with_the_command_that_copies_it(pretend_verified):
    out = render(page(reference="xtrain.comm.ring:ring_all_reduce"))
    assert "<code>xtrain copy ring_all_reduce --library -o DIR</code>" in out
    assert "base64" not in out
    out = render(page(reference="xtrain.comm.ring_pass:RingPass"))
    assert "xtrain copy" not in out


# --- the verified line ---------------------------------------------------------------


def test_the_verified_line_says_who_where_and_when(toy):
    toy.record("toy.ring:ring")
    out = re.sub(r"<[^>]+>", "", render(page()))
    assert "Verified by 2 tests · gloo on 1, 4 ranks · 21 Nov 2026" in out


def test_without_a_record_the_build_stops_and_says_what_to_do(toy):
    with pytest.raises(verification.UnverifiedError, match=r"toy.ring:ring.*make test"):
        render(page())


@pytest.mark.parametrize(
    "file", ["src/toy/ring.py", "src/toy/steps.py", "tests/test_ring.py"]
)
def test_a_change_of_anything_its_tests_reach_matters(toy, file):
    toy.record("toy.ring:ring")
    path = toy.root / file
    path.write_text("# a new first line\n" + path.read_text())
    with pytest.raises(verification.UnverifiedError, match="code has changed"):
        render(page())


def test_a_change_of_what_its_tests_do_not_reach_does_not_matter(toy):
    toy.record("toy.ring:ring")
    toy.write("src/toy/lone.py", "X = 1\n")
    toy.write("tests/test_other.py", "X = 1\n")
    assert "Verified by" in render(page())


def test_what_no_rank_ran_shows_no_backend(toy):
    toy.record("toy.ring:ring", places=[])
    assert "gloo" not in render(page())
    toy.record("toy.ring:ring")
    assert "gloo on 1, 4" in render(page())


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"outcome": "failed"}], "test_ring.* fails"),
        ([{}, {"outcome": "failed", "backend": "xtrain-shm"}], "test_ring.* fails"),
        ([{"outcome": "skipped"}], "code has changed|no recorded test"),
    ],
    ids=["failed", "failed on one backend", "skipped"],
)
def test_a_failed_or_skipped_test_is_not_evidence(toy, records, why):
    for options in records:
        toy.record("toy.ring:ring", **options)
    with pytest.raises(verification.UnverifiedError, match=why):
        render(page())


def test_a_draft_marks_instead_of_stopping(toy, monkeypatch):
    monkeypatch.setenv("XTRAIN_DOCS_DRAFT", "1")
    assert "Not verified" in render(page())


def test_what_ran_on_another_torch_is_not_verified(toy, monkeypatch):
    toy.record("toy.ring:ring")
    monkeypatch.setattr(verification, "torch_minor", lambda: "9.9")
    with pytest.raises(verification.UnverifiedError, match=r"not tested on torch 9.9"):
        render(page())


# --- whiteboard forms ---------------------------------------------------------------

FORM = '"""Turn.\n\nComputes: a turn.\n"""\n\n\ndef turn(x):\n    return -x\n'
FORM_FILE = "src/xtrain/whiteboard/comm/turn.py"
FORM_KEY = "xtrain.whiteboard.comm.turn:turn"


def write_form(toy, self_check=True):
    toy.write(FORM_FILE, FORM)
    checks = "src/xtrain/copying/self_checks"
    toy.write(f"{checks}/harness.py", "def run(check, form):\n    check(form)\n")
    if self_check:
        text = "def unused():\n    pass\n\n\nTHREE = 3\n\n\n"
        text += "def check_turn(form):\n    print(form(THREE))\n"
        toy.write(f"{checks}/comm.py", text)


def test_a_form_is_shown_whole_and_downloaded_with_its_self_check(
    toy, pretend_verified
):
    write_form(toy)
    out = render(page(reference=FORM_FILE))
    code = re.search(r"<code>(.*?)</code>", out, re.S)
    assert html.unescape(re.sub(r"<[^>]+>", "", code[1])).strip("\n") == FORM.strip()
    assert '<code class="xt-path">xtrain/whiteboard/comm/turn.py</code>' in out
    assert "[xtrain.whiteboard.comm.turn.turn]" in out  # resolved by autorefs
    assert "Verified by 1 test" in re.sub(r"<[^>]+>", "", out)
    assert 'download="turn.py"' in out
    packed = re.search(r"data:text/x-python;base64,([\w+/=]+)", out)
    text = base64.b64decode(packed[1]).decode()
    assert text.startswith(FORM) and "unused" not in text
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout == "-3\n", done.stderr


def test_a_form_without_a_test_or_a_self_check_stops_the_build(toy):
    write_form(toy, self_check=False)
    with pytest.raises(EmbedError, match=r"turn.py has no self-check"):
        render(page(reference=FORM_FILE))
    write_form(toy)
    with pytest.raises(verification.UnverifiedError, match=FORM_KEY):
        render(page(reference=FORM_FILE))


def test_a_form_has_a_reference_entry_and_a_self_check_has_none():
    listed = reference_pages.modules()
    assert "xtrain.whiteboard.comm.ring_all_reduce" in listed
    assert not [name for name in listed if "self_checks" in name]


def test_a_form_on_a_page_counts_as_its_symbol_a_function_or_a_class(toy):
    write_form(toy)
    toy.write("docs/en/a.md", page(reference=FORM_FILE))
    assert list(authored.embedded()) == [FORM_KEY]
    assert symbols.form_key("src/xtrain/comm/ring.py") is None
    reference = "src/xtrain/whiteboard/zero/half_turn.py"
    toy.write(reference, "class _Half:\n    pass\n\n\nclass HalfTurn:\n    pass\n")
    key = "xtrain.whiteboard.zero.half_turn:HalfTurn"
    assert symbols.form_key(reference) == key


# --- files and links ------------------------------------------------------------------


def test_a_snippet_its_transcript_and_a_broken_twin(toy):
    for folder in ("lc1", "wrong/lc1"):
        file = f"snippets/{folder}/a.py"
        toy.write(file, f"# python {file}\nprint(1)\n")
        out = render(page(reference=file))
        assert 'download="a.py"' in out
        assert ("xt-wrong" in out) == (folder == "wrong/lc1")
    toy.write("snippets/lc1/a.out", "1\n")
    plain = re.sub(r"<[^>]+>", "", render(page(reference="snippets/lc1/a.out")))
    assert "$ python snippets/lc1/a.py\n1" in plain


@pytest.mark.parametrize(
    "name", ["snippets/none.py", "../outside.py", "snippets/b.out"]
)
def test_a_missing_file_stops_the_build(toy, name):
    toy.write("snippets/b.out", "an orphan")
    (toy.root.parent / "outside.py").write_text("")
    with pytest.raises(EmbedError):
        render(page(reference=name))


NAMED = (
    "[t](test:tests/test_ring.py::test_ring) [s](src:toy.ring:Wheel.turn) "
    "[f](file:tests/odd.json) [again](test:tests/test_ring.py::test_ring)"
)


def opened(out: str) -> dict[str, str]:
    """The code of each closed block of a page, by its id."""
    found = re.findall(r'<details [^>]*id="([^"]+)".*?<code>(.*?)</code>', out, re.S)
    plain = {name: re.sub(r"<[^>]+>", "", text) for name, text in found}
    return {name: html.unescape(text).strip("\n") for name, text in plain.items()}


def test_evidence_that_a_page_names_opens_in_the_page(toy):
    test = '@mark(1)\ndef test_ring():\n    x = "$a$ {{ b }} [c](test:d) ```"'
    toy.write("tests/test_ring.py", f"import os\n\n\n{test}\n\n\ndef other(): ...\n")
    odd = toy.write("tests/odd.json", '{"a": "<b>"}\n')
    out = render(NAMED)
    ids = re.findall(r'<a href="#([^"]+)">', out)
    code = opened(out)
    assert len(code) == 3
    assert ids[0] == ids[3]
    assert code[ids[0]] == test
    assert code[ids[1]] == resolve("toy.ring:Wheel.turn").source
    assert code[ids[2]] == odd.read_text().strip()
    assert "http" not in out


def test_a_page_that_names_no_evidence_ends_with_its_words(toy):
    assert "<details" not in render("[a](#b)\n\n# b")


def test_opened_evidence_links_the_repository_that_is_named(toy, monkeypatch):
    monkeypatch.setenv("XTRAIN_REPO_URL", "https://example.org/x")
    out = render("[t](test:tests/test_ring.py::test_ring)")
    assert 'href="https://example.org/x/blob/main/tests/test_ring.py#L2-L3"' in out
    assert len(opened(out)) == 1


@pytest.mark.parametrize(
    "target",
    ["test:tests/test_ring.py::test_rong", "test:tests/no.py::test_ring",
     "src:toy.ring:no", "file:no.py"],
)  # fmt: skip
def test_a_link_to_missing_evidence_stops_the_build(toy, target):
    with pytest.raises((EmbedError, SymbolError)):
        render(f"[x]({target})")


def test_fences_inside_lists_and_boxes(toy):
    toy.record("toy.ring:ring")
    text = "!!! note\n\n" + "\n".join("    " + x for x in page("doc: off").splitlines())
    out = render(text)
    assert "admonition" in out
    assert "xt-bar" in out
    assert "--8<--" not in out


def test_options_are_read_one_per_line():
    reference, options = excerpts.parse(
        ['--8<-- "a.b:c"', "doc: off", 'hl: x = "quoted"', "note: y"]
    )
    assert reference == "a.b:c"
    assert options == Options(False, [], ['x = "quoted"'], ["y"])
