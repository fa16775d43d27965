"""The tables of the support matrix say what the record says, and no more."""

import re

import pytest

from xtrain.evidence.results import Result
from xtrain_docs import blocks, config, stale, verification
from xtrain_docs.matrix.cases import REFUSED, WRONG
from xtrain_docs.matrix.features import FEATURES, SCHEDULED, WRAPPERS
from xtrain_docs.tables import support_matrix
from xtrain_docs.tables.support_matrix import OURS, ROW, SHORT, SYMBOL


@pytest.fixture
def recorded(monkeypatch):
    """`recorded(ids)`: a record of tests that passed, and that failed."""

    def plant(passed, failed=()):
        ledger = verification.Ledger()
        ledger.current[SYMBOL] = [
            Result(test, outcome, [("gloo", 2)], "2.13", {})
            for outcome, ids in (("passed", passed), ("failed", failed))
            for test in ids
        ]
        monkeypatch.setattr(verification, "ledger", lambda: ledger)

    return plant


def table(name):
    return blocks.registry("table").run(name, {})


def cell(name, row, column):
    found = table(name)
    line = next(r for r in found.rows if r[0].endswith(row))
    return line[list(found.header).index(column)]


def pairs_of(name):
    """What the table of pairs says of a feature: the count, then the exceptions."""
    found = table("support_pairs")
    (told,) = (told for title, told in found.rows if title == FEATURES[name].title)
    return told.split("<br>")


JOIN = [
    f"refused: {FEATURES['interleaved'].title}",
    f"no wrapper takes both: {FEATURES['offload'].title}; {FEATURES['meta'].title}",
]
ALONE = [FEATURES[name].title for name in SCHEDULED]
ALL_ROWS = [f"{ROW}[{wrapper}-{name}]" for wrapper in WRAPPERS for name in FEATURES]


def test_what_no_test_has_run_is_untried(recorded):
    recorded([], ALL_ROWS)
    for name in ("support_features", "support_nesting", "support_backends"):
        assert {c for row in table(name).rows for c in row[1:]} == {"untried"}
    assert {row[2] for row in table("support_reasons").rows} == {"untried"}
    for title, told in table("support_pairs").rows:
        assert re.fullmatch(r"0 of \d+<br>untried", told), title


def test_a_test_that_passed_fills_its_own_cells_only(recorded):
    recorded([f"{ROW}[ddp-clip]"])
    clip = FEATURES["clip"].title
    assert cell("support_features", clip, "DDP") == "works"
    assert cell("support_features", clip, "FSDP") == "untried"
    assert cell("support_features", FEATURES["tied"].title, "DDP") == "untried"
    count, *rest = pairs_of("tied")
    assert count.startswith("0 of ")
    others = [short for short in SHORT.values() if short != "DDP"]
    assert f"untried under {', '.join(others)}: {clip}" in rest


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
    assert len(pairs_of("adamw")) == 1
    count, *rest = pairs_of("join")
    assert rest == JOIN
    works, tried = map(int, count.split(" of "))
    assert works == tried - 3
    kept = f"refused under FSDP, FSDP kept: {FEATURES['pipeline'].title}"
    assert pairs_of("tied")[1:] == [kept]
    assert not {row[0] for row in table("support_pairs").rows} & set(ALONE)


def test_what_is_declared_wrong_shows_as_wrong(recorded, monkeypatch):
    monkeypatch.setitem(WRONG, ("ddp", "accumulate", "join"), "for this test")
    recorded(ALL_ROWS)
    assert pairs_of("join")[1:] == [f"wrong: {FEATURES['accumulate'].title}", *JOIN]


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
