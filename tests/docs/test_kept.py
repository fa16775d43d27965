"""Kept results: good while nothing they depend on changes, and true when run anew."""

import json

import pytest

from xtrain.evidence import store
from xtrain_docs import config, kept, runs, symbols, transcripts


@pytest.fixture
def ask(toy, monkeypatch):
    """Ask for a result of toy.ring; how often it was run."""
    monkeypatch.setattr(kept, "asked", {})
    ran = []

    def ask_once(result="seen", name="ring"):
        roots = [symbols.module_path("toy.ring")]
        return kept.remembered("toys", name, roots, lambda: ran.append(1) or result)

    ask_once.ran = ran
    return ask_once


def toys(folder):
    return kept.shelf(folder / "toys.json")


def test_a_result_is_kept_as_json(toy, ask):
    assert ask((1, {"a": None})) == ask("new") == [1, {"a": None}]
    assert ask(None, "another") is ask("new", "another") is None
    assert len(ask.ran) == 2
    assert kept.asked == {"toys": toys(kept.local()).good()}
    kept.note_asked()
    assert kept.asked == {"toys": toys(kept.last_build()).read()}


def test_an_edit_of_what_it_reaches_runs_it_again_and_no_other(toy, ask):
    ask()
    toy.write("src/toy/lone.py", "X = 1\n")
    toy.write("src/elsewhere/ring.py", "X = 1\n")
    assert ask("new") == "seen"
    path = toy.root / "src/toy/steps.py"
    path.write_text(path.read_text() + "# another word\n")
    assert ask("new") == "new"


def test_another_torch_runs_it_again(toy, ask, monkeypatch):
    ask()
    monkeypatch.setattr(store, "torch_minor", lambda: "9.9")
    assert ask("new") == "new"


def test_other_roots_run_it_again(toy, ask):
    """The code is the same, and the run is said to reach more of it."""
    ask()
    roots = [symbols.module_path(f"toy.{name}") for name in ("ring", "steps")]
    assert kept.remembered("toys", "ring", roots, lambda: "new") == "new"


def test_what_is_committed_comes_first_while_it_is_good(toy, ask):
    ask("local")
    entry = toys(kept.local()).good()["ring"].with_value("committed")
    toys(kept.committed()).write({"ring": entry})
    assert ask() == "committed"
    old = store.Entry("0" * 16, entry.torch, entry.roots, "committed")
    toys(kept.committed()).write({"ring": old})
    assert ask() == "local"
    assert len(ask.ran) == 1


# --- the committed ones --------------------------------------------------------------

COMMITTED = [
    (path.stem, asked)
    for path in sorted(kept.committed().glob("*.json"))
    if path.stem != "transcripts"  # tests/snippets runs every snippet
    if path.stem != "spine_wrappers"  # test_spine runs those
    for asked in kept.shelf(path).read()
    if "by_the_clock" not in asked  # times, which are others in every run
]


def close(fresh, stored):
    """Equal, but for what the system decides.

    That is bytes on a wire, where headers count, and which of the messages under way
    together ends first.
    """
    if isinstance(stored, dict):
        return fresh.keys() == stored.keys() and all(
            fresh[key] == pytest.approx(stored[key], rel=0.02)
            if key == "wire" and stored[key] is not None
            else close(fresh[key], stored[key])
            for key in stored
        )
    if isinstance(stored, list) and stored and all(map(is_event, stored)):
        return all(map(is_event, fresh)) and in_order(fresh) == in_order(stored)
    if isinstance(stored, list):
        return len(fresh) == len(stored) and all(map(close, fresh, stored))
    return fresh == stored


OF_THE_PROCESSOR = ("lc7_balance", "planning_measured_memory")
"""What differs between vector instructions: a router's training multiplies the last bit
of a sum, and attention's kernel keeps other buffers. On a processor of another kind
than the record's such a result has the same form, and comes out again there."""


def alike(fresh, stored):
    """The same form: keys, lengths, kinds of values."""
    if isinstance(stored, dict):
        return fresh.keys() == stored.keys() and all(
            alike(fresh[key], stored[key]) for key in stored
        )
    if isinstance(stored, list):
        return len(fresh) == len(stored) and all(map(alike, fresh, stored))
    return type(fresh) is type(stored)


def is_event(entry):
    return isinstance(entry, list) and len(entry) > 5 and entry[1] in ("send", "recv")


def in_order(events):
    """Events without the count of calls before them; what was together still is."""
    calls = sorted({event[6] for event in events})
    return sorted([*map(str, e[:6]), calls.index(e[6]), str(e[7:])] for e in events)


@pytest.mark.parametrize(("shelf", "asked"), COMMITTED)
def test_a_committed_result_comes_out_again(world, monkeypatch, shelf, asked):
    if (world(2).device, world(2).backend) != ("cpu", "gloo"):
        pytest.skip("the pages' runs are made over gloo on CPUs")
    monkeypatch.setattr(runs, "_world", world)
    stored = kept.shelf(kept.committed() / f"{shelf}.json").read()[asked].value
    fresh = json.loads(json.dumps(runs.again(asked)))
    if shelf in OF_THE_PROCESSOR and not close(fresh, stored):
        assert alike(fresh, stored)
        stored = json.loads(json.dumps(runs.again(asked)))
    assert close(fresh, stored)


def test_what_is_close_and_what_is_not():
    assert close([{"wire": 1000, "sent": 1}], [{"wire": 1010, "sent": 1}])
    assert not close([{"wire": 1000}], [{"wire": 1100}])
    assert not close([{"sent": 1000}], [{"sent": 1010}])
    assert not close([1], [1, 2])
    sent, got = [0, "send", "send", 1, 8, 8, 3], [0, "recv", "recv", 1, 8, 8, 3]
    assert close([sent, got], [[*got[:6], 7], [*sent[:6], 7]])
    assert not close([sent, got], [[*got[:6], 7], [*sent[:6], 8]])
    assert not close([sent, got], [sent, sent])
    assert not close([sent], [[*sent[:4], 9, 9, 3]])
    assert not close({"a": 1}, {"b": 1})


def test_what_is_alike_and_what_is_not():
    assert alike({"a": [1.5, "x"]}, {"a": [2.5, "y"]})
    assert not alike({"a": [1.5]}, {"a": [1.5, 2.5]})
    assert not alike({"a": 1}, {"b": 1}) and not alike([1.0], ["1.0"])


def test_every_shelf_is_of_something_that_can_run_again():
    modules = {json.loads(asked)[0].partition(":")[0] for _, asked in COMMITTED}
    for module in modules:
        assert symbols.module_path(module).is_file()
    assert transcripts.embedded()
    assert config.ROOT in kept.committed().parents
