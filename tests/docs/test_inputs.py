"""A build is spared when nothing it was made of has changed, and only then."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from tests.docs.test_build import EMBED, MKDOCS
from xtrain.evidence import closure
from xtrain_docs import authored, build, config, inputs, prebuild, symbols

PAGE = EMBED % "_hidden" + '\n```py\n--8<-- "snippets/a.py"\n```\n'


@pytest.fixture
def built(toy, monkeypatch):
    """The toy repository with its site built."""
    monkeypatch.setattr(prebuild, "main", lambda: None)
    monkeypatch.setattr(build, "main_config", lambda: toy.root / "mkdocs.yml")
    monkeypatch.setattr(config, "SITE", toy.root / "build/site")
    toy.write("mkdocs.yml", MKDOCS % "true")
    toy.write("docs/en/index.md", PAGE)
    ledger = "# L\n\n<a id=verified-toy.ring._hidden>"
    toy.write("docs/en/verification/ledger.md", ledger)
    toy.write("snippets/a.py", "print(1)\n")
    toy.record("toy.ring:_hidden")
    # A build is a process of its own, which has read nothing yet.
    for read in (closure._part, closure._reached, symbols._text,
                 symbols._tree, authored._text):  # fmt: skip
        read.cache_clear()
    assert build.main([]) == 0
    return toy


def test_a_change_of_anything_it_was_made_of_is_seen(built, capsys):
    capsys.readouterr()
    assert inputs.main() == 0
    assert "nothing it was made of has changed" in capsys.readouterr().out
    kinds = ("docs/en/index.md", "src/toy/ring.py", "snippets/a.py", "mkdocs.yml",
             "tests/test_ring.py", "build/verification/gloo-cpu.json")  # fmt: skip
    for name in kinds:
        path = built.root / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert inputs.differences(config.SITE) == [name]
        assert inputs.main() == 1
        path.unlink()
        assert name in inputs.differences(config.SITE)
        path.write_bytes(before)  # the same again, at another time
        assert inputs.differences(config.SITE) == []


def test_what_another_program_downloads_is_no_input(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(config, "BUILD", tmp_path / "build")
    archive = tmp_path / "build/pyodide/new/pyodide.tgz"
    archive.parent.mkdir(parents=True)
    page, note = tmp_path / "page.md", tmp_path / "build/site.inputs.json"
    page.write_text("here")
    watch = inputs.Watch(tmp_path / "build/site")
    page.read_text()
    subprocess.run(["touch", archive], check=True)  # not this process
    archive.read_bytes()
    archive.unlink()
    watch.save(note)
    assert "page.md" in json.loads(note.read_text())["files"]


def test_a_record_of_tests_is_seen_when_there_was_none(built, monkeypatch):
    folder = built.root / "docs/data/verification"
    monkeypatch.setattr(config, "RECORDS", (*config.RECORDS, folder))
    assert build.main([]) == 0
    built.write("docs/data/verification/gloo-cpu.json", "{}")
    assert inputs.differences(config.SITE) == ["docs/data/verification"]


def test_a_new_page_is_seen_and_what_nobody_reads_is_not(built):
    built.write("README.md", "Hello.\n")
    built.write("docs/en/.hidden", "")
    assert inputs.differences(config.SITE) == []
    built.write("docs/en/new.md", "# New\n")
    assert inputs.differences(config.SITE) == ["docs/en"]


def test_settings_and_versions_are_seen(built, monkeypatch):
    monkeypatch.setenv("XTRAIN_SITE_URL", "https://example.org/en/")
    assert inputs.differences(config.SITE) == ["versions or settings"]
    monkeypatch.delenv("XTRAIN_SITE_URL")
    assert inputs.differences(config.SITE) == []
    newer = [SimpleNamespace(name="mkdocs", version="9")]
    monkeypatch.setattr(inputs, "distributions", lambda: newer)
    assert inputs.differences(config.SITE) == ["versions or settings"]


def test_an_address_that_the_build_completes_is_the_same_the_next_time(
    built, monkeypatch
):
    monkeypatch.setenv("XTRAIN_SITE_URL", "https://example.org/x")
    assert build.main([]) == 0
    monkeypatch.setenv("XTRAIN_SITE_URL", "https://example.org/x")
    assert inputs.differences(config.SITE) == []


def test_without_a_whole_site_it_is_built(built):
    (config.SITE / "index.html").unlink()
    assert inputs.differences(config.SITE) == ["all"]


def test_a_build_that_fails_leaves_the_old_site_to_be_built_again(built):
    built.write("docs/en/index.md", "# T\n\n{{ gone }}\n")
    assert build.main([]) == 1
    assert inputs.differences(config.SITE) == ["docs/en/index.md"]


def test_what_is_edited_while_it_is_read_counts_as_changed(toy):
    page, made = toy.write("docs/en/a.md", "one"), toy.write("docs/en/made.md", "old")
    note = toy.root / "build/site.inputs.json"
    note.parent.mkdir()
    watch = inputs.Watch(toy.root / "build/site")
    page.read_text()
    made.read_text()
    made.write_text("new")  # by the build itself
    os.utime(made, (1, 1))
    watch.save(note)
    assert note.is_file()
    watch = inputs.Watch(toy.root / "build/site")
    page.read_text()
    os.utime(page, (1, 1))  # by somebody else
    watch.save(note)
    assert not note.exists()
