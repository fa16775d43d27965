"""Calculators: what may be entered, what is answered, and how Python gets there."""

import base64
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from tests.docs.rendering import render
from tests.random_values import random_values
from xtrain.plan import (
    Accelerator,
    Assumptions,
    Layout,
    ModelShape,
    memory_over_step,
    search,
)
from xtrain.schedules import SCHEDULES, simulate
from xtrain_docs import config, pyodide
from xtrain_docs.blocks import BlockError, parse_info
from xtrain_docs.build import has
from xtrain_docs.calculators import element as made
from xtrain_docs.calculators.answers import CALCULATORS, answer
from xtrain_docs.calculators.forms import Choice, Number, Upload, read_values
from xtrain_docs.calculators.planning import FEW
from xtrain_docs.calculators.repairs import peak, smaller_layouts

WHOLE = Number("ranks", "Ranks", 4, 1, 16)
ANY = Number("time", "Time", 1.0, 0, 10, 0)
WORD = Choice("kind", "Kind", "a", ("a", "b"))


def test_what_fits_is_read():
    given = {"ranks": "3", "time": "2.5", "kind": "b"}
    values = read_values((WHOLE, ANY, WORD), given)
    assert values == {"ranks": 3, "time": 2.5, "kind": "b"}
    assert isinstance(values["ranks"], int)
    assert read_values((WHOLE, ANY, WORD), {}) == {"ranks": 4, "time": 1.0, "kind": "a"}


@pytest.mark.parametrize("text", ["0", "17", "2.5", "", "nan", "inf", "four"])
def test_what_does_not_fit_is_named(text):
    with pytest.raises(ValueError, match=r"Ranks: .* a whole number from 1 to 16"):
        read_values((WHOLE,), {"ranks": text})


def test_an_unknown_word_or_field_is_named():
    with pytest.raises(ValueError, match="Kind: 'c' is not one of a, b"):
        read_values((WORD,), {"kind": "c"})
    with pytest.raises(ValueError, match="no field is called 'size'"):
        read_values((WORD,), {"size": "1"})
    with pytest.raises(ValueError, match="there are: memory, best, layouts, pipeline"):
        answer("nothing", {})


def cells(text: str) -> dict[str, str]:
    """The rows of an answer's table."""
    row = r'<th scope="row">([^<]*)</th><td>([^<]*)</td>'
    return dict(re.findall(row, text))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_the_pipeline_is_what_the_simulator_says(schedule):
    given = {"schedule": schedule, "ranks": "3", "micro_batches": "7", "p2p": "0.5"}
    shown = cells(answer("pipeline", given))
    played = simulate(SCHEDULES[schedule](3, 7), p2p=0.5)
    assert shown["Time of the step"] == f"{played.makespan:.4g}"
    assert shown["Bubble: idle / work"] == f"{played.bubble_over_ideal:.1%}"
    kept = ", ".join(f"{peak:g}" for peak in played.peak_activations)
    assert shown["Micro-batches kept, by rank"] == kept


def test_chunks_share_the_time_of_a_rank():
    shown = cells(answer("pipeline", {"schedule": "interleaved", "micro_batches": "8"}))
    assert shown["Time in which a rank computes"] == f"{8 * 3.0:.4g}"


def test_the_memory_is_what_plan_says():
    shown = cells_of(answer("memory", {"zero": "0"}))
    layout = Layout(
        data=4, tensor=8, pipeline=2, micro_batches=16, sequence_parallel=True
    )
    shape = ModelShape.preset("llama-3-70b")
    phases = memory_over_step(shape, layout, 4096)
    expected = [f"{memory.total / 2**30:.2f}" for memory in phases.values()]
    assert shown["together"] == expected
    assert shown["weights"] == [expected_of(phases, "weights")] * 4
    assert shown["activations"].count("–") == 3


def expected_of(phases, name):
    return f"{phases['at rest'].parts()[name] / 2**30:.2f}"


def test_the_fullest_rank_is_shown():
    """Of eight stages the last holds logits, the first most micro-batches."""
    words = answer("memory", {"pipeline": "8", "data": "1"})
    assert "The first pipeline rank needs" in words
    one = answer("memory", {"pipeline": "2", "data": "1", "micro_batches": "1"})
    assert "The last pipeline rank needs" in one


def test_a_layout_that_breaks_a_rule_is_refused_with_the_rule():
    with pytest.raises(ValueError, match="query heads 64 is not divisible") as problem:
        answer("memory", {"tensor": "7"})
    said = str(problem.value)
    assert "Tensor ranks 7" in said and said.endswith("It would do with Tensor ranks 8")
    assert answer("memory", {"tensor": "8"})
    mixtral = {"model": "mixtral-8x7b", "pipeline": "1"}
    with pytest.raises(
        ValueError, match="Expert ranks .of the data ranks. 3"
    ) as problem:
        answer("memory", mixtral | {"expert": "3"})
    said = str(problem.value).partition("It would do with ")[2]
    assert said == "Expert ranks (of the data ranks) 2"
    assert answer("memory", mixtral | {"expert": "2"})


def test_what_would_make_it_fit_does_and_the_fastest_comes_first():
    shape, device = ModelShape.preset("llama-3-70b"), Accelerator.preset("h100")
    layout = Layout(data=8, tensor=8, zero=0, micro_batch=2, sequence_parallel=True)
    limit = device.memory - 4 * 2**30
    assert peak(shape, layout, 4096, "megatron18") > limit
    found = smaller_layouts(shape, layout, device, 4096, "megatron18", limit)
    assert found == sorted(found, key=lambda one: one[2])
    assert "ZeRO stage 3" in [words for words, _, _ in found]
    sharded = replace(layout, zero=3)
    (needed,) = [needed for words, needed, _ in found if words == "ZeRO stage 3"]
    assert needed == peak(shape, sharded, 4096, "megatron18") <= limit
    given = {"data": "8", "pipeline": "1", "zero": "0", "micro_batch": "2",
             "micro_batches": "1"}  # fmt: skip
    shown = cells_of(answer("memory", given))
    for words, nbytes, seconds in found:
        assert shown[words] == [f"{nbytes / 2**30:.2f}", f"{seconds:.2f}"]
    fits = cells_of(answer("memory", given | {"zero": "3"}))
    assert not fits.keys() & {words for words, _, _ in found}


def test_where_no_single_change_is_enough_it_says_so():
    given = {"model": "llama-3.1-405b", "data": "1", "tensor": "1", "pipeline": "1"}
    assert "No single change makes it fit" in answer("memory", given)


def test_a_config_json_takes_the_place_of_the_model():
    entries = {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    own = {"model": "gpt-3-175b", "config": json.dumps(entries)}
    assert answer("memory", own) == answer("memory", {"model": "llama-3-8b"})
    for text, said in (("{", "not JSON"), ("[]", "no entries"), ("{}", "model_type")):
        with pytest.raises(ValueError, match=said):
            answer("memory", {"config": text})
    with pytest.raises(ValueError, match="more than 100000 letters"):
        answer("memory", {"config": " " * 100_001})


def test_the_short_answer_is_the_best_of_its_search():
    shown = cells_of(answer("best", {"model": "llama-3-8b", "gpus": "8"}))
    assumed = Assumptions(reserve=4 * 2**30)
    shape = ModelShape.preset("llama-3-8b")
    first = search(shape, "h100", 8, 4096, 512, space=FEW, assumptions=assumed).found[0]
    assert shown[str(first.layout)][1] == f"{first.seconds:.2f}"
    assert "No layout of 2 GPUs" in answer("best", {"gpus": "2"})


def test_the_layouts_are_what_search_finds():
    given = {"model": "llama-3-8b", "gpus": "8", "batch": "64", "gpu": "h100"}
    shown = answer("layouts", given)
    shape = ModelShape.preset("llama-3-8b")
    assumed = Assumptions(recipe="megatron18", reserve=4 * 2**30)
    found = search(shape, "h100", 8, 4096, 64, assumptions=assumed)
    assert f"{found.tried} layouts tried, {found.estimated} are legal" in shown
    best = found.found[0]
    low, high = (rate / 8 for rate in best.range)
    start = shown.index(f">{best.layout}<")
    row = re.findall("<td>([^<]*)</td>", shown[start : shown.index("</tr>", start)])
    assert row[:2] == [f"{best.seconds:.2f}", f"{best.mfu:.1%}"]
    assert row[3] == "fits"
    assert row[-2:] == [f"{best.causal_mfu:.1%}", f"{low:,.0f} to {high:,.0f}"]
    for rejected in found.rejected:
        assert rejected.rule in cells_of(shown)


def test_where_nothing_fits_only_the_reasons_are_shown():
    shown = answer("layouts", {"model": "llama-3.1-405b", "gpus": "2", "batch": "2"})
    assert "No layout fits." in shown
    assert "memory" in cells_of(shown)


def cells_of(text: str) -> dict[str, list[str]]:
    """The rows of an answer's tables: all cells after the first, by the first."""
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text)
    return {first: re.findall("<td>([^<]*)</td>", rest) for first, rest in rows}


@pytest.mark.parametrize("name", CALCULATORS)
def test_any_allowed_value_is_answered_or_refused_in_words(name):
    draw = random.Random(name)
    answers: list[str] = []
    refused = []
    while len(answers) < 3:
        given = random_values(CALCULATORS[name].fields, draw)
        try:
            answers.append(answer(name, given))
        except ValueError as problem:
            refused.append(str(problem))
    assert all("<table " in text or "No layout of" in text for text in answers)
    assert all(refused)


@pytest.mark.parametrize("name", CALCULATORS)
def test_the_element_has_a_labelled_control_for_each_field(monkeypatch, name):
    monkeypatch.setattr(made, "is_ready", lambda: True)
    text = made.element(name)
    for field in CALCULATORS[name].fields:
        at = f"xt-{name}-{field.name}"
        assert f'<label for="{at}">' in text
        file = f'id="{at}" type="file" accept=".json" data-into="{field.name}"'
        named = f'id="{at}" name="{field.name}"'
        assert (file if isinstance(field, Upload) else named) in text
    assert "<fieldset>" in text
    assert answer(name, {}) in text


def test_without_python_the_form_is_off_and_says_so(monkeypatch):
    monkeypatch.setattr(made, "is_ready", lambda: False)
    text = made.element("pipeline", ranks=2)
    assert "<fieldset disabled>" in text
    assert made.WITHOUT in text
    assert answer("pipeline", {"ranks": 2}) in text


def test_a_page_names_a_calculator_that_exists():
    assert parse_info("calculator pipeline ranks=2") == (
        "calculator",
        "pipeline",
        {"ranks": 2},
    )
    with pytest.raises(ValueError, match="no calculator 'none'"):
        made.element("none")
    with pytest.raises(BlockError, match="needs the name"):
        parse_info("calculator")


# ---------------------------------------------------------------- Python in the page


def test_the_archive_runs_alone(tmp_path):
    """The browser has no torch and no repository: neither has this process."""
    archive = tmp_path / "xtrain.zip"
    pyodide.pack(archive)
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from xtrain_docs.calculators.answers import CALCULATORS, answer\n"
        "import xtrain; assert sys.argv[1] in xtrain.__file__\n"
        "print([answer(name, {}) for name in CALCULATORS])"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(archive)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([answer(name, {}) for name in CALCULATORS])


def test_the_archive_is_the_same_whenever_it_is_made(tmp_path):
    for name in ("a.zip", "b.zip"):
        pyodide.pack(tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert "xtrain/plan/memory.py" in names
    assert "xtrain_docs/calculators/element.py" not in names


def package(path, files: dict[str, bytes]) -> str:
    """An npm package; returns its digest."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def test_only_the_pinned_package_is_unpacked(tmp_path):
    files = {name: name.encode() for name in pyodide.FILES}
    digest = package(tmp_path / "pyodide.tgz", files)
    with pytest.raises(ValueError, match="another SHA-512"):
        pyodide.unpack(tmp_path / "pyodide.tgz", tmp_path)
    assert not (tmp_path / pyodide.LOCK).exists()
    pyodide.unpack(tmp_path / "pyodide.tgz", tmp_path, digest)
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No files of Pyodide, and no npm client."""
    monkeypatch.setattr(config, "BUILD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XTRAIN_RELEASE", raising=False)
    pyodide.is_ready.cache_clear()
    yield tmp_path
    pyodide.is_ready.cache_clear()


def test_without_npm_the_build_goes_on_and_says_why(nowhere, capsys):
    assert not pyodide.is_ready()
    assert "without Python for the browser (there is no npm client)" in (
        capsys.readouterr().out
    )
    pyodide.write(nowhere / "site")
    assert not (nowhere / "site").exists()


def test_a_release_needs_it(nowhere, monkeypatch):
    monkeypatch.setenv("XTRAIN_RELEASE", "1")
    with pytest.raises(pyodide.MissingPyodide, match="there is no npm client"):
        pyodide.is_ready()


@pytest.mark.parametrize("tag", ["xtrain-calculator", "xtrain-drill"])
def test_only_a_site_with_such_an_element_gets_python(tmp_path, tag):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text(f"<p>{tag}</p>")
    assert not has(tmp_path, tag)
    (tmp_path / "index.html").write_text(f'<{tag} id="x">')
    assert has(tmp_path, tag)


def test_the_element_is_no_word_of_a_paragraph(monkeypatch):
    """A form inside of a paragraph would end it, and leave the element empty."""
    monkeypatch.setattr(made, "is_ready", lambda: True)
    page = render("```calculator pipeline\nA caption.\n```")
    assert "<div><xtrain-calculator" in page
    assert "<p><div>" not in page and "<p><xtrain" not in page
