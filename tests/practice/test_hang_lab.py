"""The hang lab: jobs that fail again as recorded, and what is said about them."""

import contextlib
import inspect
import json
import re

import pytest

from xtrain import cli
from xtrain.practice.hang_lab import jobs, lab
from xtrain.practice.hang_lab.lab import RUNS, SIZE
from xtrain.practice.hang_lab.recording import record, without_machine

LAB = "xtrain.practice.hang_lab.lab"
HANG = "xtrain.cli.hang:run"
RUNS_KEPT = json.loads(RUNS.read_text())
each = pytest.mark.parametrize("fault", lab.faults(), ids=lambda fault: fault.job)


def essence(run):
    """Of each rank: how it ended, its lines less errors, and its calls."""
    found = []
    for rank in range(SIZE):
        *lines, ending = run["output"][rank]
        printed = [
            re.sub(r": [\d.]+ s$", "", line)
            for line in lines
            if re.match(r"(?!terminate)[a-z]|  File", line)
        ]
        dump = run["dumps"][rank]
        calls = dump and [
            (e["profiling_name"], e["input_sizes"], e["input_dtypes"], e["state"],
             e["frames"][0]["line"])
            for e in dump["entries"]
        ]  # fmt: skip
        where = dump and dump["frames"][0]["name"]
        found.append((ending, printed, calls, where))
    return found


@each
@pytest.mark.verifies("xtrain.practice.hang_lab.recording:record")
def test_a_job_fails_again_as_it_was_recorded(fault, tmp_path):
    fresh = record(fault.job, tmp_path, fault.live)
    assert essence(fresh) == essence(RUNS_KEPT[fault.job])


@each
@pytest.mark.verifies(f"{LAB}:report")
def test_the_tool_names_the_same_rank_or_the_lab_tells_why_not(fault):
    told = lab.report(fault)
    if not fault.told:
        assert "xtrain hang` repeats the errors" in fault.why and "stuck" not in told
        return
    assert fault.told in told
    named = re.findall(r"rank (\d)", fault.told)
    assert fault.rank in named or (fault.rank == "all" and len(set(named)) == SIZE)
    recorded = re.findall(r"(\w+)\(", told)
    assert fault.call == "none" or set(fault.call.split()) & {*recorded, "new_group"}


@each
def test_what_is_kept_is_of_these_lines_and_of_no_machine(fault):
    run = json.dumps(RUNS_KEPT[fault.job])
    assert without_machine(run) == run
    assert not re.search(r"/home|/work|/tmp|\[127|\.py:\d+\] *E", run)
    source, first = inspect.getsourcelines(getattr(jobs, fault.job))
    for line in re.finditer(
        rf'File "jobs.py", line (\d+), in {fault.job}\n    (.+)',
        "\n".join(line for rank in RUNS_KEPT[fault.job]["output"] for line in rank),
    ):
        assert source[int(line[1]) - first].strip() == line[2]
    for place in re.findall(rf"jobs.py:(\d+) in {fault.job}", lab.calls(fault)):
        assert 0 < int(place) - first < len(source)


@each
@pytest.mark.verifies(f"{LAB}:judge")
def test_one_rank_is_right_and_every_other_answer_has_its_reason(fault):
    right = [
        (rank, call)
        for rank in lab.RANKS
        for call in lab.CALLS
        if lab.judge(fault, rank, call).right
    ]
    assert right == [(fault.rank, call) for call in lab.CALLS if call in fault.call]
    for rank in lab.RANKS:
        words = lab.judge(fault, rank, "barrier").words
        assert len(words) > 30 and words.endswith((".", ")."))
        if rank != fault.rank:
            assert words.startswith("No. ") and fault.why not in words


def test_twelve_jobs_are_shown_without_their_answer():
    assert len(lab.faults()) == len(RUNS_KEPT) == 12
    assert {fault.job for fault in lab.faults()} == RUNS_KEPT.keys()
    for fault in lab.faults():
        shown = lab.output(fault) + lab.calls(fault)
        assert all(f"[rank{rank}] " in shown for rank in range(SIZE))
        assert fault.why not in shown


@pytest.mark.verifies(HANG)
def test_the_command_shows_writes_and_judges(tmp_path, capsys):
    assert cli.main(["hang", "lab"]) == 0
    assert "12  A group for an expert" in capsys.readouterr().out
    assert cli.main(["hang", "lab", "3", "-o", str(tmp_path / "dumps")]) == 0
    shown = capsys.readouterr().out
    assert "[rank0] saved" in shown and "0/3 barrier() at jobs.py" in shown
    assert cli.main(["hang", str(tmp_path / "dumps")]) == 1
    assert capsys.readouterr().out.strip() == lab.report(lab.fault("3"))
    answer = ["hang", "lab", "3", "--call", "barrier", "--rank"]
    assert cli.main([*answer, "1"]) == 1
    assert "Rank 1 waits in all_reduce at jobs.py" in capsys.readouterr().out
    assert cli.main([*answer, "0"]) == 0
    right = capsys.readouterr().out
    assert right.startswith("Right. Rank 0 calls") and "def train_and_save" in right


@pytest.mark.verifies(HANG)
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("lab 13", "no fault '13': there are 1 to 12"),
        ("lab 1 2", "the lab shows one job, not 2"),
        ("lab 1 --rank 2", "an answer has both --rank and --call"),
        ("somewhere --rank 2", "belong to `xtrain hang lab NUMBER`"),
        ("lab 1 --rank 7", "invalid choice: '7'"),
    ],
)
def test_other_words_are_refused(words, problem, capsys):
    with contextlib.suppress(SystemExit):  # of argparse
        assert cli.main(["hang", *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_a_rank_or_a_call_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="rank 3 is to be one of 0, 1, 2, all"):
        lab.judge(lab.fault("1"), "3", "send")
