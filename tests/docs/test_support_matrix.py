"""The tables of the support matrix say what the record says, and no more."""

import pytest

from xtrain_docs import blocks, config, stale, verification
from xtrain_docs.matrix.cases import REFUSED, WRONG
from xtrain_docs.matrix.features import FEATURES, WRAPPERS
from xtrain_docs.tables import support_matrix
from xtrain_docs.tables.support_matrix import OURS, PLAIN, ROW, SYMBOL


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


ALL_ROWS = [f"{ROW}[{wrapper}-{name}]" for wrapper in WRAPPERS for name in FEATURES]


def test_what_no_test_has_run_is_untried(recorded):
    recorded([], ALL_ROWS)
    for name in ("support_features", "support_nesting", "support_backends"):
        assert {c for row in table(name).rows for c in row[1:]} == {"untried"}
    assert {row[2] for row in table("support_reasons").rows} == {"untried"}
    cells = {c for row in table("support_pairs").rows for c in row[1:]}
    assert cells == {"untried", "-", ""}


def test_a_test_that_passed_fills_its_own_cells_only(recorded):
    recorded([f"{ROW}[ddp-clip]"])
    clip = FEATURES["clip"].title
    assert cell("support_features", clip, "DDP") == "works"
    assert cell("support_features", clip, "FSDP") == "untried"
    assert cell("support_features", FEATURES["tied"].title, "DDP") == "untried"
    column = str(PLAIN.index("clip") + 1)
    assert cell("support_pairs", FEATURES["tied"].title, column) == "1"


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
    tied = str(PLAIN.index("tied") + 1)
    assert cell("support_pairs", FEATURES["frozen"].title, tied) == "6"
    accumulate = str(PLAIN.index("accumulate") + 1)
    assert cell("support_pairs", FEATURES["join"].title, accumulate) == "1"
    ahead = str(PLAIN.index("interleaved") + 1)
    assert cell("support_pairs", FEATURES["join"].title, ahead) == "refused"


def test_what_is_declared_wrong_shows_as_wrong(recorded, monkeypatch):
    monkeypatch.setitem(WRONG, ("ddp", "accumulate", "join"), "for this test")
    recorded(ALL_ROWS)
    accumulate = str(PLAIN.index("accumulate") + 1)
    assert cell("support_pairs", FEATURES["join"].title, accumulate) == "wrong"


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
