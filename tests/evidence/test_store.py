"""The store: an entry is good for the code and torch it ran on, and no other."""

import json
import multiprocessing

import pytest

from xtrain.evidence import store
from xtrain.evidence.store import Entry, Store

FILES = {
    "src/toy/__init__.py": "",
    "src/toy/ring.py": "from toy.steps import shift\n",
    "src/toy/steps.py": "def shift(): ...\n",
    "tests/conftest.py": "",
    "tests/test_ring.py": "import toy.ring\nimport cupboard\n",
    "cupboard.py": "",  # what stands beside the tests is found from the root
    "said.out": "turned\n",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def shelf(root):
    return Store(root / "build/deep/shelf.json", root)


def ran(root, value="seen"):
    roots = [root / "tests/test_ring.py", root / "said.out"]
    return Entry.now(roots, root).with_value(value)


def test_an_entry_comes_back_as_it_was_kept(root, shelf):
    shelf.put({"turn": ran(root, (1, {"a": None}))}, {"backend": "gloo"})
    (found,) = Store(shelf.path, root).good().values()
    assert found == ran(root, [1, {"a": None}])
    assert found.roots == ("tests/test_ring.py", "said.out")
    assert shelf.about() == {"backend": "gloo"}


@pytest.mark.parametrize("file", FILES)
def test_a_change_of_anything_it_reached_makes_it_old(root, shelf, file):
    shelf.put({"turn": ran(root)})
    (root / "unrelated.py").write_text("X = 1\n")
    (root / "src/toy/lone.py").write_text("X = 1\n")
    assert "turn" in shelf.good()
    (root / file).write_text(FILES[file] + "# a word\n")
    assert shelf.good() == {}
    assert "turn" in shelf.read()
    (root / file).write_text(FILES[file])
    assert "turn" in shelf.good()
    (root / file).unlink()
    assert shelf.good() == {}


def test_another_torch_makes_it_old_and_the_code_is_still_its(root, shelf, monkeypatch):
    shelf.put({"turn": ran(root)})
    monkeypatch.setattr(store, "torch_minor", lambda: "9.9")
    assert shelf.good() == {}
    assert shelf.read()["turn"].is_of(root)
    assert not ran(root).is_of_same(shelf.read()["turn"])


@pytest.mark.parametrize(
    "tampered", [{"key": "0" * 16}, {"torch": "1.0"}, {"roots": ["said.out"]}]
)
def test_what_was_tampered_with_is_refused(root, shelf, tampered):
    shelf.put({"turn": ran(root)})
    content = json.loads(shelf.path.read_text())
    content["entries"]["turn"] |= tampered
    shelf.path.write_text(json.dumps(content))
    assert "turn" in shelf.read() and shelf.good() == {}


def test_what_is_added_drops_what_is_old_and_nothing_else(root, shelf):
    old = Entry("0" * 16, ran(root).torch, ("said.out",), 1)
    shelf.put({"old": old, "turn": ran(root)}, {"backend": "gloo"})
    shelf.put({"other": ran(root)})
    assert shelf.read().keys() == {"turn", "other"}
    shelf.put({"turn": ran(root, "new")})
    assert shelf.read()["turn"].value == "new"
    assert shelf.about() == {"backend": "gloo"}


def keep(shelf, number):
    shelf.put({f"entry {number}": ran(shelf.root, number)})


def test_processes_that_add_at_once_lose_nothing(shelf):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=keep, args=(shelf, n)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(shelf.good()) == 8
    assert len(shelf.path.read_text().splitlines()) == 10  # a line each


def test_a_file_that_is_missing_or_broken_or_of_another_form_holds_nothing(shelf):
    assert shelf.read() == {}
    shelf.path.parent.mkdir(parents=True)
    for text in ('{"schema": 2, "entries": {"a": {}}}', "{", "[]"):
        shelf.path.write_text(text)
        assert (shelf.read(), shelf.about()) == ({}, {})
