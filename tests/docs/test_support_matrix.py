"""The tables of the support matrix say what the record says, and no more."""

import pytest

from xtrain_docs import blocks, config, stale, verification
from xtrain_docs.matrix.cases import REFUSED, WRONG
from xtrain_docs.matrix.features import FEATURES, SCHEDULED, WRAPPERS
from xtrain_docs.tables import support_matrix
from xtrain_docs.tables.support_matrix import OURS, ROW, SHORT, SYMBOL


@pytest.fixture
def recorded(monkeypatch):
    """`recorded(ids)`: a record of tests that passed, and that failed."""

    def plant(passed, failed=()):
        tests = [
            {"id": test, "outcome": outcome, "places": [["gloo", 2]]}
            for outcome, ids in (("passed", passed), ("failed", failed))
            for test in ids
        ]
        about = (SYMBOL, "gloo", "cpu", "2026-11-21", "2.13", "Linux")
        evidence = verification.Evidence(*about, tuple(tests))
        ledger = verification.Ledger(())
        ledger.current[SYMBOL] = [evidence]
        monkeypatch.setattr(verification, "ledger", lambda: ledger)

    return plant


def table(name):
    return blocks.registry("table").run(name, {})


def cell(name, row, column):
    found = table(name)
    line = next(r for r in found.rows if r[0].endswith(row))
    return line[list(found.header).index(column)]


def pairs_of(name):
    """The row of a feature in the table of pairs, by column."""
    found = table("support_pairs")
    (row,) = (row for row in found.rows if row[0] == FEATURES[name].title)
    return dict(zip(found.header, row, strict=True))


JOIN = (
    f"Refused: {FEATURES['interleaved'].title}. "
    f"No wrapper takes both: {FEATURES['offload'].title}; {FEATURES['meta'].title}."
)
ALONE = [FEATURES[name].title for name in SCHEDULED]
ALL_ROWS = [f"{ROW}[{wrapper}-{name}]" for wrapper in WRAPPERS for name in FEATURES]


def test_what_no_test_has_run_is_untried(recorded):
    recorded([], ALL_ROWS)
    for name in ("support_features", "support_nesting", "support_backends"):
        assert {c for row in table(name).rows for c in row[1:]} == {"untried"}
    assert {row[2] for row in table("support_reasons").rows} == {"untried"}
    assert {tuple(row[2:]) for row in table("support_pairs").rows} == {("0", "untried")}


def test_a_test_that_passed_fills_its_own_cells_only(recorded):
    recorded([f"{ROW}[ddp-clip]"])
    clip = FEATURES["clip"].title
    assert cell("support_features", clip, "DDP") == "works"
    assert cell("support_features", clip, "FSDP") == "untried"
    assert cell("support_features", FEATURES["tied"].title, "DDP") == "untried"
    row = pairs_of("tied")
    assert row["works with"] == "0"
    others = [short for short in SHORT.values() if short != "DDP"]
    only_ddp = f"Untried under {', '.join(others)}: {clip}."
    assert only_ddp in row["but not with"]


def test_every_declared_case_shows_as_declared_once_all_have_passed(recorded):
    recorded(ALL_ROWS)
    works = refused = wrong = 0
    for name in ("support_features", "support_nesting"):
        cells = [c for row in table(name).rows for c in row[1:]]
        works += cells.count("works")
        refused += cells.count("refused")
        wrong += cells.count("wrong")
    assert refused == sum(len(case) == 2 for case in REFUSED)
    assert wrong == sum(len(case) == 2 for case in WRONG)
    assert works + refused + wrong == len(WRAPPERS) * len(FEATURES)
    assert pairs_of("adamw")["but not with"] == ""
    join = pairs_of("join")
    assert join["but not with"] == JOIN
    assert int(join["works with"]) == int(join["tried with"]) - 3
    assert "Refused under FSDP, FSDP kept: two" in pairs_of("tied")["but not with"]
    assert not {row[0] for row in table("support_pairs").rows} & set(ALONE)


def test_what_is_declared_wrong_shows_as_wrong(recorded, monkeypatch):
    monkeypatch.setitem(WRONG, ("ddp", "accumulate", "join"), "for this test")
    recorded(ALL_ROWS)
    before = f"Wrong: {FEATURES['accumulate'].title}. "
    assert pairs_of("join")["but not with"] == before + JOIN


def test_cases_are_counted_where_they_ran(recorded):
    recorded([f"{ROW}[ddp-join]", f"{OURS}[xtrain-shm-ddp]"])
    title = WRAPPERS["ddp"]
    assert cell("support_backends", title, "`gloo`") == "1"
    assert cell("support_backends", title, "`xtrain-shm`") == str(len(FEATURES))
    assert cell("support_backends", title, "`nccl`") == "untried"


def test_the_tests_behind_the_tables_run_before_the_pages_are_built(recorded):
    assert SYMBOL in stale.TABLES
    recorded([], ALL_ROWS[:1])
    assert "fails" in stale.unproved()[SYMBOL]


def test_names_of_tests_are_those_of_the_matrix():
    for test in (support_matrix.ROW, support_matrix.OURS):
        path, _, name = test.partition("::")
        assert f"def {name}(" in (config.ROOT / path).read_text()
