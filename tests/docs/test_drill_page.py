"""Drills in the page: their data, what Python reads, and the editor from npm."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.docs.rendering import render
from tests.docs.test_calculators import package
from xtrain.cli.drill import hints
from xtrain.copying.forms import public_name
from xtrain.practice import LEVELS, drill, drills, task
from xtrain.practice.page import IN_PAGE
from xtrain_docs import config, drill_pages, editor, pyodide


def test_each_drill_of_the_page_exists():
    assert set(IN_PAGE) <= set(drills())
    assert [one.name for one in drill_pages.in_page()] == [
        name for name in drills() if name in IN_PAGE
    ]


@pytest.mark.parametrize("name", IN_PAGE)
def test_the_data_are_those_of_the_command_line(name):
    one = drill(name)
    found = json.loads(json.dumps(drill_pages.data(one)))
    assert found["tasks"] == {level: task(one, level) for level in LEVELS}
    assert found["hints"] == hints(one)
    assert found["solution"] == one.solution
    assert (found["minutes"], found["difficulty"]) == (one.minutes, one.difficulty)
    assert found["computes"].startswith(one.header["Computes"])
    assert found["sends"].startswith(one.header.get("Sends", ""))
    for part in ("computes", "sends", "leaves_out"):
        assert found[part] in " ".join(one.solution.split())
    assert public_name(one.solution) in found["called"]
    assert "#" not in found["called"]


def test_the_list_links_every_drill_and_loads_nothing(monkeypatch):
    monkeypatch.setattr(pyodide, "is_ready", lambda: True)
    page = render("```table drills_in_page\n```")
    for name in IN_PAGE:
        assert page.count(f'<li id="{name}"><a href="#{name}">') == 1
    assert drill_pages.WITHOUT_PYTHON not in page
    assert "<p><div" not in page and "<p><xtrain" not in page
    assert "<script" not in page
    monkeypatch.setattr(pyodide, "is_ready", lambda: False)
    assert drill_pages.WITHOUT_PYTHON in drill_pages.element()


# ------------------------------------------------------------- Python in the page

ALONE = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from xtrain.practice import page
assert sys.argv[1] in page.__file__
page.start()
from xtrain.practice.drills import drill
for name in ("ring_all_reduce", "gpipe"):
    for source in (drill(name).solution, "import torch"):
        print(json.dumps(json.loads(page.answer(name, source, 4))["right"]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """What the page's worker unpacks."""
    path = tmp_path_factory.mktemp("drills") / "drills.zip"
    pyodide.pack_files(path, drill_pages.files(), drill_pages.CHANGED)
    return path


def test_the_archive_checks_drills_alone(archive, tmp_path):
    """The browser has no torch and no repository: neither has this process."""
    zipfile.ZipFile(archive).extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["true", "false"] * 2


def test_the_archive_has_files_as_they_are_but_for_a_few(archive, tmp_path):
    again = tmp_path / "again.zip"
    pyodide.pack_files(again, drill_pages.files(), drill_pages.CHANGED)
    assert again.read_bytes() == archive.read_bytes()
    packed = zipfile.ZipFile(archive)
    assert "xtrain/practice/mistakes/comm.toml" in packed.namelist()
    assert "xtrain/practice/stand_in/torch/__init__.py" in packed.namelist()
    for name in packed.namelist():
        text = packed.read(name).decode()
        here = (config.SOURCE / name).read_text()
        assert text == drill_pages.CHANGED.get(name, here)
    assert archive.stat().st_size < 400_000


# ------------------------------------------------------------- the editor

NAMED = re.compile(r'from "(?P<name>[^"]+)"')


def test_each_package_is_pinned_and_none_is_more():
    known = editor.pins()
    assert NAMED.findall(editor.ENTRY.read_text())
    assert set(NAMED.findall(editor.ENTRY.read_text())) <= set(known)
    for version, digest in (*known.values(), *editor.pins(editor.TOOL).values()):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert len(digest) == 88
    with pytest.raises(ValueError, match="argument"):
        editor.pins("name 1.0.0 half")


def test_only_the_pinned_package_is_unpacked(tmp_path):
    digest = package(tmp_path / "crelt.tgz", {"index.js": b"export {}"})
    with pytest.raises(ValueError, match="another SHA-512"):
        editor.unpack(tmp_path / "crelt.tgz", tmp_path, "other")
    assert not (tmp_path / "index.js").exists()
    editor.unpack(tmp_path / "crelt.tgz", tmp_path, digest)
    assert (tmp_path / "index.js").read_bytes() == b"export {}"


@pytest.mark.skipif(not editor.is_whole(), reason="the editor was not made here")
def test_the_editor_is_small_and_has_its_licences():
    made = (editor.folder() / "editor.mjs").read_bytes()
    assert len(gzip.compress(made)) < 150_000
    assert not re.search(rb"\bimport\b[^(.]*\bfrom\b|\bimport\(", made)
    notice = (editor.folder() / "NOTICE.txt").read_text()
    for name, (version, _) in editor.pins().items():
        assert f"{name} {version}\n" in notice
    assert notice.count("Permission is hereby granted") == len(editor.pins())
    assert "esbuild" not in notice


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """Nothing from npm, and no npm client."""
    monkeypatch.setattr(config, "BUILD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XTRAIN_RELEASE", raising=False)
    for module in (pyodide, editor):
        module.is_ready.cache_clear()
    yield tmp_path
    for module in (pyodide, editor):
        module.is_ready.cache_clear()


def test_without_npm_there_is_a_plain_editor_and_the_build_goes_on(nowhere, capsys):
    drill_pages.write(nowhere / "site")
    printed = capsys.readouterr().out
    assert "with a plain text field as the editor (there is no npm client)" in printed
    assets = nowhere / "site" / "assets"
    assert not (assets / "editor").exists()
    index = json.loads((assets / "drills" / "index.json").read_text())
    assert (index["python"], index["editor"]) == (False, False)
    assert set(index["drills"]) == set(IN_PAGE)
    assert json.loads((assets / "drills" / "gpipe.json").read_text())["name"] == "gpipe"


def test_a_release_needs_the_editor(nowhere, monkeypatch):
    monkeypatch.setenv("XTRAIN_RELEASE", "1")
    with pytest.raises(editor.MissingEditor, match="there is no npm client"):
        editor.is_ready()


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_what_an_import_takes_has_the_right_shape():
    """The store of the page, in node: an entry of any shape becomes a whole one."""
    store = config.SOURCE / "xtrain_docs/theme/assets/drill-store.mjs"
    program = (
        f"import {{ parse, minutes }} from {json.dumps(store.as_uri())};\n"
        "const text = JSON.stringify({ format: 'xtrain drills 1', drills: {\n"
        "  gpipe: { level: 'none', texts: { body: 'x', other: 1 }, hints: -1.5 },\n"
        "  other: {} } });\n"
        "const found = Object.fromEntries(parse(text, ['gpipe']));\n"
        "let refused = '';\n"
        "try { parse('[]', []); } catch (problem) { refused = problem.message; }\n"
        "console.log(JSON.stringify({ found, refused, time: minutes(125) }));"
    )
    printed = subprocess.run(
        ["node", "--input-type=module", "-e", program],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    said = json.loads(printed)
    assert said["found"] == {
        "gpipe": {
            "level": "body", "texts": {"body": "x"}, "seconds": {}, "ended": {},
            "solved": {}, "hints": 0, "checks": 0,
        }
    }  # fmt: skip
    assert said["refused"] == "This file was not exported from this page."
    assert said["time"] == "2:05"
