"""The quick tier: every symbol at two world sizes, and all that is cheap."""

import pytest

from tests import tiers


def record(*tests: tuple[str, str, float, list[int]]) -> dict[str, list[dict]]:
    """Of (symbol, test, seconds, world sizes)."""
    found: dict[str, list[dict]] = {}
    for symbol, name, seconds, sizes in tests:
        places = [["gloo", size] for size in sizes]
        test = {"id": name, "seconds": seconds, "places": places}
        found.setdefault(symbol, []).append(test)
    return found


def test_each_symbol_of_the_record_runs_at_two_world_sizes() -> None:
    symbols = tiers.symbols(tiers.RECORD)
    taken = tiers.chosen(symbols)
    assert len(symbols) > 700
    for name, tests in symbols.items():
        assert taken & {test["id"] for test in tests}, name
        sizes = {size for test in tests for _, size in test["places"]}
        ran = {
            size for test in tests if test["id"] in taken for _, size in test["places"]
        }
        assert len(ran) >= min(2, len(sizes)), name


def test_the_tier_takes_a_sixth_of_the_time() -> None:
    symbols = tiers.symbols(tiers.RECORD)
    seconds = {t["id"]: t["seconds"] for tests in symbols.values() for t in tests}
    taken = sum(seconds[name] for name in tiers.chosen(symbols))
    assert taken < sum(seconds.values()) / 6


def test_the_cheapest_test_at_two_sizes_and_all_cheap_ones_are_chosen() -> None:
    found = record(
        ("a", "one", 9.0, [1]),
        ("a", "two", 9.0, [2]),
        ("a", "two quick", 3.0, [2]),
        ("a", "three", 40.0, [3]),
        ("a", "four", 4.0, [4]),
        ("a", "cheap", 0.05, [8]),
        ("b", "both", 5.0, [2, 3]),
        ("b", "either", 3.0, [3]),
        ("c", "alone", 70.0, []),
        ("c", "alone, quicker", 60.0, []),
        ("d", "one size", 5.0, [1]),
    )
    assert tiers.chosen(found) == {
        "two quick", "three", "cheap", "both", "alone, quicker", "one size",
    }  # fmt: skip
    here = {"two", "four", "both", "alone"}
    assert tiers.chosen(found, here) == here


def test_long_tests_are_there_and_prove_no_symbol_alone() -> None:
    symbols = tiers.symbols(tiers.RECORD)
    for path, names in tiers.LONG.items():
        text = (tiers.RECORD.parents[3] / "tests" / path).read_text()
        for name in names:
            assert f"\ndef {name}(" in text, (path, name)
    for name, tests in symbols.items():
        assert not any(tiers.is_long(test["id"]) for test in tests), name


SUITE = """
import pytest
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_known(size): pass
def test_new(): pass
@pytest.mark.parametrize("size", [1, 2])
def test_long(size): pass
"""


def make_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"test_suite.py::test_known[{size}]" for size in (1, 2, 3, 4)]
    found = record(
        *(("s", name, 1.0, [size]) for size, name in enumerate(ids, 1))
    )  # fmt: skip
    pytester.makepyfile(test_suite=SUITE)
    pytester.makeini("[pytest]\ntestpaths = .\n")
    pytester.makeconftest(
        "from tests import tiers\n"
        f"tiers.symbols = lambda record: {found!r}\n"
        "tiers.LONG = {'test_suite.py': ['test_long']}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tiers.RECORD.parents[3]))
    for name in ("symbols", "LONG"):  # that conftest also runs in this process
        monkeypatch.setattr(tiers, name, getattr(tiers, name))


def run_here(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A run in this process, 3 s of imports less than one of its own."""
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], 3),
        (["-n", "2"], 3),
        (["-k", "known"], 4),
        (["test_suite.py"], 7),
        (["test_suite.py", "-n", "1"], 7),
        (["--rest"], 4),
        (["--rest", "-n", "2"], 4),
    ],
)
def test_the_tier_selects_unless_tests_are_named(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    passed: int,
) -> None:
    make_suite(pytester, monkeypatch)
    outcome = pytester.runpytest_subprocess("-p", "tests.tiers", *arguments)
    outcome.assert_outcomes(
        passed=passed, deselected=7 - passed if "-n" not in arguments else 0
    )
    named = [line for line in outcome.outlines if line.startswith("quick tier: ")]
    assert len(named) == (passed == 3)


def test_the_rest_is_what_the_tier_leaves_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite(pytester, monkeypatch)

    def collected(*arguments: str) -> set[str]:
        outcome = run_here(pytester, "--collect-only", "-q", *arguments)
        return {line for line in outcome.outlines if line.startswith("test_suite.py::")}

    tier, rest = (
        collected("-p", "tests.tiers"),
        collected("-p", "tests.tiers", "--rest"),
    )
    assert tier == {f"test_suite.py::test_{t}" for t in ("known[2]", "known[3]", "new")}
    assert tier.isdisjoint(rest) and tier | rest == collected()
    parts = [
        collected("-p", "tests.tiers", "--rest", f"--part={turn}/2") for turn in (6, 7)
    ]
    assert all(parts)
    assert parts[0].isdisjoint(parts[1]) and parts[0] | parts[1] == rest


@pytest.mark.parametrize("part", ["2", "1/0", "a/b"])
def test_a_part_that_is_not_one_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    make_suite(pytester, monkeypatch)
    outcome = run_here(pytester, "-p", "tests.tiers", "--rest", f"--part={part}")
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
    outcome.stderr.fnmatch_lines([f"*--part={part} is not K/N*"])


def test_another_backend_runs_what_has_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        @pytest.fixture
        def xtrain_worlds(): pass
        @pytest.fixture
        def world(xtrain_worlds): pass
        @pytest.mark.parametrize("size", [1, 2])
        def test_with(world, size): pass
        def test_without(): pass
    """)
    outcome = run_here(pytester, "-p", "tests.tiers", "--ranks", ".")
    outcome.assert_outcomes(passed=2, deselected=1)
    outcome = run_here(pytester, "-p", "tests.tiers", ".")
    outcome.assert_outcomes(passed=3)
