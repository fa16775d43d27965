"""What `make test` runs of all tests: the quick tier, a plugin of pytest.

    python -m pytest -p tests.tiers                     # the quick tier
    python -m pytest -p tests.tiers --rest              # what it leaves out
    python -m pytest -p tests.tiers --rest --part=2/3   # one of three parts of that
    python -m pytest -p tests.tiers --ranks --backend=nccl-rules tests/comm

A test that carries `verifies` is in the record with its seconds and the world sizes it
ran at. Of these the tier takes all that are cheap and, for every symbol, the cheapest
test at each of two world sizes. Tests that prove no symbol run, but for LONG ones.

Tests that are named, by a path or with -k, run whole; with --ranks only those that
have ranks, which are all that another backend can change.
"""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "docs" / "data" / "verification" / "gloo-cpu.json"
CHEAP = 0.1  # seconds
SIZES = 2
LONG = {
    "backends/test_two_hosts.py": ["test_two_hosts_reduce_train_and_notice_the_cut"],
    "cli/test_bench.py": [
        "test_a_part_of_a_run_writes_only_where_it_is_told",
        "test_resume_refuses_a_record_made_otherwise",
        "test_resume_runs_only_what_has_too_few_samples",
    ],
    "cli/test_copying.py": [
        "test_the_list_has_every_name_with_the_lines_of_both_forms"
    ],
    "cli/test_main.py": ["test_a_reader_who_leaves_early_ends_a_command_quietly"],
    "comm/test_process_group.py": [
        "test_one_torchrun_on_each_node_makes_one_job",
        "test_a_program_that_destroys_its_groups_ends_in_good_order",
    ],
    "copying/test_library.py": ["test_the_check_of_a_package_runs_and_is_right"],
    "docs/test_build.py": ["test_the_check_runs_real_snippets"],
    "docs/test_cluster_clock.py": [
        "test_the_bench_measures_each_program_in_its_rounds"
    ],
    "docs/test_fonts.py": ["test_a_face_is_cut_to_its_letters"],
    "docs/test_kept.py": ["test_a_committed_result_comes_out_again"],
    "docs/test_lc3.py": ["test_every_figure_of_the_lecture_fits_a_phone"],
    "docs/test_pages.py": ["test_everything_on_the_page_renders"],
    "docs/test_pages_shape.py": ["test_figures_of_a_page_fit_a_phone"],
    "docs/test_published_layouts.py": [
        "test_deepseek_in_fewer_bytes_would_be_faster",
        "test_each_case_has_a_row_and_a_reason",
        "test_most_are_among_the_first_ten",
    ],
    "docs/test_record.py": [
        "test_the_committed_record_is_of_this_code",
        "test_the_committed_results_are_of_this_code",
    ],
    "docs/test_spine.py": ["test_a_mistake_leaves_the_curve"],
    "evidence/test_marks.py": ["test_ours_stand_on_single_tests"],
    "pipeline_parallel/test_runner_failures.py": [
        "test_a_rank_that_is_killed_ends_all_others_with_its_name"
    ],
    "practice/test_checking.py": [
        "test_a_file_of_a_reader_is_judged_in_words_that_help",
        "test_a_task_of_each_level_can_be_executed_and_is_not_solved",
        "test_another_file_with_a_known_mistake_is_recognised_with_its_line",
        "test_a_file_that_cannot_be_executed",
        "test_a_known_mistake_is_told_in_its_own_words_and_twice_the_same",
        "test_a_process_that_cannot_be_interrupted_is_ended",
        "test_a_solution_is_right_on_virtual_ranks",
        "test_memory_that_is_not_freed_is_told_of_a_right_file",
    ],
    "practice/test_in_page.py": [
        "test_a_file_that_counts_its_calls_is_run_whole",
        "test_a_hang_names_the_lines_and_what_buffers_would_do",
        "test_every_known_mistake_is_told_in_its_own_words",
        "test_every_solution_is_right_in_a_page",
        "test_files_of_readers_are_judged_as_on_the_command_line",
    ],
    "practice/test_stand_in.py": ["test_the_sampler_to_compare_with_is_torchs"],
    "plan/test_traffic_measured.py": ["test_all_reduce_sends_the_formula"],
    "snippets/test_transcripts.py": ["test_a_fresh_run_prints_the_transcript"],
    "test_mutate.py": [
        "test_a_run_that_never_ends_is_caught",
        "test_a_weak_test_lets_mutants_live_and_a_strong_one_does_not",
    ],
    "test_packaging.py": [
        "test_the_source_distribution_holds_every_file_of_the_repository",
        "test_the_wheel_holds_the_package_and_nothing_that_needs_a_checkout",
    ],
    "test_packaging_setup.py": [
        "test_a_change_installs_again",
        "test_a_torch_of_ours_is_not_taken_for_the_users_after_a_failure",
        "test_a_torch_that_is_kept_gets_a_torchrun_in_the_environment",
        "test_a_torch_that_was_named_once_stays",
        "test_an_environment_without_a_pip_that_works_is_named",
    ],
    "testing/test_lifetime.py": [
        "test_a_killed_xdist_worker_takes_its_ranks_along",
        "test_a_program_killed_in_the_middle_of_a_run",
        "test_a_program_that_never_closes_its_world",
        "test_ctrl_c_during_a_test",
        "test_ranks_of_a_program_ended_by_sigterm",
    ],
    "testing/test_plugin.py": [
        "test_gpus_beside_the_tests_are_counted_in_a_child_and_hidden",
        "test_ranks_on_gpus_see_those_that_were_visible",
        "test_the_test_processes_of_xdist_see_the_gpus_too",
    ],
    "testing/test_script.py": ["test_torchrun_prints_the_same"],
    "testing/test_verify_gpu.py": [
        "test_a_run_ends_in_time_and_the_next_goes_on_even_if_a_test_hangs",
        "test_after_ctrl_c_what_passed_is_kept",
        "test_what_passed_is_kept_when_a_test_fails_and_only_the_rest_runs_again",
    ],
    "test_tiers.py": ["test_the_tier_selects_unless_tests_are_named"],
    "train/test_script.py": ["test_only_the_mesh_differs"],
    "whiteboard/test_downloads.py": [
        "test_a_download_compares_and_says_what_it_sent",
        "test_xtrain_is_out_of_reach_here",
    ],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rest", action="store_true", help="run what the quick tier leaves out"
    )
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="of --rest, the K-th of N parts"
    )
    parser.addoption("--ranks", action="store_true", help="only tests that have ranks")


def are_named(config: pytest.Config) -> bool:
    return config.args_source is config.ArgsSource.ARGS or bool(config.option.keyword)


def pytest_report_header(config: pytest.Config) -> str | None:
    if are_named(config):
        return None
    if config.option.rest:
        return "what the quick tier leaves to `make test-all`"
    record = symbols(RECORD)
    every = {test["id"] for tests in record.values() for test in tests}
    return (
        f"quick tier: {len(record)} symbols at two world sizes by"
        f" {len(chosen(record)):,} of {len(every):,} tests, and what is cheap;"
        " `make test-all` adds the other sizes, layouts and dtypes"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.option.ranks:
        keep_if(config, items, lambda item: "xtrain_worlds" in item.fixturenames)
    if are_named(config):
        return
    record = symbols(RECORD)
    here = {item.nodeid for item in items}
    known = {test["id"] for tests in record.values() for test in tests}
    taken = chosen(record, here)
    rest, part = config.option.rest, config.option.part

    def wanted(item: pytest.Item) -> bool:
        name = item.nodeid
        leave = is_long(name) or (name in known and name not in taken)
        return leave and in_part(name, part) if rest else not leave

    keep_if(config, items, wanted)


def keep_if(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[..., bool]
) -> None:
    kept, left = [], []
    for item in items:
        (kept if wanted(item) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def is_long(name: str) -> bool:
    path, _, function = name.partition("::")
    return function.partition("[")[0] in LONG.get(path.removeprefix("tests/"), [])


def in_part(name: str, part: str) -> bool:
    """Whether a test is in the K-th of N parts; K may be any number, 4/3 is 1/3."""
    try:
        turn, parts = map(int, part.split("/"))
        return zlib.crc32(name.encode()) % parts == turn % parts
    except (ValueError, ZeroDivisionError):
        raise pytest.UsageError(f"--part={part} is not K/N, as 2/3") from None


def symbols(record: Path) -> dict[str, list[dict]]:
    """Every symbol of a record with the tests that proved it."""
    found: dict[str, list[dict]] = defaultdict(list)
    for name, entry in json.loads(record.read_text())["entries"].items():
        value = entry["value"]
        for symbol, places in value["ran"].items():
            if places is not None:
                test = {"id": name, "seconds": value["seconds"], "places": places}
                found[symbol].append(test)
    return dict(sorted(found.items()))


def chosen(
    record: Mapping[str, Iterable[Mapping]], here: set[str] | None = None
) -> set[str]:
    """The tests that the quick tier takes of a record, of those that are `here`.

    Two ranks come first, then three and more; one rank, and none, come last.
    """
    taken: set[str] = set()
    for tests in record.values():
        at: dict[int, dict[str, float]] = defaultdict(dict)
        for test in tests:
            if here is not None and test["id"] not in here:
                continue
            if test["seconds"] < CHEAP:
                taken.add(test["id"])
            for _, size in test["places"] or [(None, 0)]:
                at[size][test["id"]] = test["seconds"]
        for size in sorted(at, key=lambda size: (size < 2, abs(size - 2)))[:SIZES]:
            if taken.isdisjoint(at[size]):
                taken.add(min(at[size], key=lambda id: (rounded(at[size][id]), id)))
    return taken


def rounded(seconds: float) -> int:
    """To a power of two, so that a choice does not change with each recording."""
    return math.ceil(math.log2(max(seconds, CHEAP)))
