"""A build is spared when nothing it was made of has changed, and only then."""

import os
from types import SimpleNamespace

import pytest

from tests.docs.test_build import EMBED, MKDOCS
from xtrain_docs import build, config, inputs, prebuild
from xtrain_docs.generated import kept_by_file

PAGE = EMBED % "_hidden" + '\n```py\n--8<-- "snippets/a.py"\n```\n'


@pytest.fixture
def built(toy, monkeypatch):
    """The toy repository with its site built."""
    monkeypatch.setattr(prebuild, "main", lambda: None)
    monkeypatch.setattr(build, "main_config", lambda: toy.root / "mkdocs.yml")
    monkeypatch.setattr(config, "SITE", toy.root / "build/site")
    toy.write("mkdocs.yml", MKDOCS % "true")
    toy.write(".gitignore", "# made\n/build/\n*.pyc\n")
    toy.write("docs/en/.gitignore", "/verification/ledger/\n")
    toy.write("docs/en/index.md", PAGE)
    ledger = "# L\n\n<a id=verified-toy.ring._hidden>"
    toy.write("docs/en/verification/ledger/ring.md", ledger)
    toy.write("snippets/a.py", "print(1)\n")
    toy.record("toy.ring:_hidden")
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
        assert inputs.differences(config.SITE) == [name]
        path.write_bytes(before)  # the same again, at another time
        assert inputs.differences(config.SITE) == []


def test_a_new_file_is_seen_unless_it_is_hidden_or_made(built):
    for name in ("docs/en/.hidden", "docs/en/verification/ledger/ring.md", "build/x",
                 "src/toy/__pycache__/ring.pyc"):  # fmt: skip
        built.write(name, "")
    assert inputs.differences(config.SITE) == []
    names = ["docs/data/build/a.json", "docs/en/new.md", "ledger.md"]
    for name in names:
        built.write(name, "# New\n")
    assert inputs.differences(config.SITE) == names


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


def test_what_is_edited_during_a_build_counts_as_changed(built, monkeypatch):
    edit = built.root / "src/toy/steps.py"
    text = edit.read_text()
    monkeypatch.setattr(prebuild, "main", lambda: edit.write_text(text + "# a word\n"))
    assert build.main([]) == 0
    assert inputs.differences(config.SITE) == ["all"]


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    seen = []
    read = kept_by_file(lambda path: seen.append(path) or path.read_text())
    file = tmp_path / "a"
    for words, time in (("one", 1), ("two", 2)):
        file.write_text(words)
        os.utime(file, (time, time))
        assert read(file) == read(file) == words
    assert len(seen) == 2
