"""Drills in a page: the same verdicts as on the command line, and messages drawn."""

import re
import sys

import pytest

from tests.practice.in_page import in_page, verdicts
from tests.practice.test_checking import FILES, SAID
from xtrain.practice import drill, drills
from xtrain.practice.judging import mistakes_of
from xtrain.practice.page import IN_PAGE

STOPPED = ("endless", "without_end", "memory")
"""Files that only Python 3.12 or the page's worker stops."""
HERE = [
    file
    for file in FILES
    if file.stem.partition("__")[0] in IN_PAGE
    and not any(word in file.stem for word in STOPPED)
]
SEND_FIRST = """
import torch
import torch.distributed as dist


def ring_all_reduce(tensor, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    parts = tensor.detach().view(-1).tensor_split(n)
    for k in range(2 * (n - 1)):
        at = (me - 2 - k) % n
        got = torch.empty_like(parts[at])
        dist.send(parts[(me - 1 - k) % n], group=group, group_dst=(me + 1) % n)
        dist.recv(got, group=group, group_src=(me - 1) % n)
        parts[at].copy_(got + parts[at] * (k < n - 1))
"""
TOGETHER = SEND_FIRST.replace(
    "dist.send(parts", "work = dist.isend(parts"
).replace(
    "group_src=(me - 1) % n)", "group_src=(me - 1) % n)\n        work.wait()"
)  # fmt: skip


def test_the_page_has_the_drills_that_it_can_check():
    assert set(IN_PAGE) <= set(drills()) and len(IN_PAGE) == len(set(IN_PAGE))
    for folder in ("comm", "schedules"):
        assert {d.name for d in drills().values() if d.folder == folder} <= {*IN_PAGE}


def test_every_solution_is_right_in_a_page():
    found = verdicts([(name, drill(name).solution) for name in IN_PAGE])
    wrong = [(n, v["words"]) for n, v in zip(IN_PAGE, found, strict=True)
             if not v["right"]]  # fmt: skip
    assert not wrong
    assert all(one["words"] == "Right on virtual ranks." for one in found)


@pytest.mark.parametrize("lecture", ["lc1", "lc2", "lc3", "lc4", "lc5", "lc6", "lc7"])
def test_every_known_mistake_is_told_in_its_own_words(lecture):
    names = [name for name in IN_PAGE if drill(name).lecture == lecture]
    planted = [(name, m) for name in names for m in mistakes_of(drill(name))]
    assert planted
    found = verdicts([(n, m.planted(drill(n).solution)) for n, m in planted])
    for (name, mistake), one in zip(planted, found, strict=True):
        assert (one["right"], one["mistake"]) == (False, mistake.words), name


def test_files_of_readers_are_judged_as_on_the_command_line():
    found = verdicts([(f.stem.partition("__")[0], f.read_text()) for f in HERE])
    assert len(found) >= 14
    for file, one in zip(HERE, found, strict=True):
        right = file.stem.partition("__")[2].startswith("right")
        assert one["right"] == right, (file.stem, one["words"])
        if not right:
            assert SAID[file.stem] in one["words"], file.stem


def test_a_hang_names_the_lines_and_what_buffers_would_do():
    (hang,) = verdicts([("ring_all_reduce", SEND_FIRST)])
    assert not hang["right"] and hang["lines"] == [12]
    assert "All of them send first" in hang["words"]
    assert "If sends were buffered it would end" in hang["words"]
    assert "rank 0 waits in line 12 for rank 1" in hang["frames"][-1]
    assert hang["frames"][-1].count('class="xd-wait"') == 4
    (right,) = verdicts([("ring_all_reduce", TOGETHER)])
    assert right["right"], right["words"]


def test_the_messages_of_a_ring_are_drawn_step_by_step():
    program = "found = json.loads(page.answer(given[0], given[1], 5))"
    found = in_page(program, ["ring_all_reduce", drill("ring_all_reduce").solution])
    assert (
        found["title"].startswith("On 5 ranks: 0+2 is the sum")
        and len(found["frames"]) == 1 + 2 * 4
    )
    assert [frame.count("xd-arrow") for frame in found["frames"]] == [0] + [5] * 8
    cells = [re.findall(r'xd-number"[^>]*>([^<]+)<', f) for f in found["frames"]]
    assert cells[0] == [str(rank) for rank in range(5) for _ in range(5)]
    assert cells[4].count("all") == 5 and cells[-1] == ["all"] * 25
    assert found["messages"].count("<tr><td>") == 5 * 8


def test_a_size_that_a_drill_does_not_take_is_replaced():
    form = drill("halving_doubling_all_reduce").solution
    program = "found = json.loads(page.answer(given[0], given[1], 7))"
    found = in_page(program, ["halving_doubling_all_reduce", form])
    assert found["title"].startswith("On 4 ranks (7 are not a size for it): ")


def test_a_schedule_is_drawn():
    program = "found = json.loads(page.answer('gpipe', given, 3))"
    found = in_page(program, drill("gpipe").solution)
    assert found["title"] == "On 3 ranks, 7 micro-batches"
    assert "<svg" in found["frames"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("        got.zero_()\n", "output was changed"),
        ("        parts[(me - 1 - k) % n].zero_()\n", "input was changed"),
    ],
)
def test_a_buffer_that_changes_while_it_is_in_flight_is_told(change, said):
    source = TOGETHER.replace("        dist.recv(got", "        w = dist.irecv(got")
    source = source.replace("        work.wait()", f"{change}        work.wait()")
    source = source.replace("work.wait()\n", "work.wait(); w.wait()\n")
    (found,) = verdicts([("ring_all_reduce", source)])
    assert not found["right"] and said in found["words"], found["words"]


def test_a_file_that_counts_its_calls_is_run_whole():
    """What a call leaves behind is there in the next one, whatever was run before."""
    source = SEND_FIRST.replace("def ring", "calls = []\n\n\ndef ring").replace(
        "    me, n", "    calls.append(tensor.numel())\n    me, n", 1
    )
    source += (
        "    if calls != [960, 7, 1][: len(calls)]:\n"
        "        raise RuntimeError(f'calls are {calls}')\n"
    )
    source = source.replace("dist.send(parts", "work = dist.isend(parts").replace(
        "group_src=(me - 1) % n)", "group_src=(me - 1) % n)\n        work.wait()"
    )
    (found,) = verdicts([("ring_all_reduce", source)])
    assert found["right"], found["words"]


def test_a_file_that_is_not_the_same_twice_is_told():
    source = SEND_FIRST.replace("import torch\n", "import random\nimport torch\n", 1)
    source = source.replace(
        "dist.send(parts[(me - 1 - k) % n]",
        "dist.send(torch.ones(SYSTEM.randint(1, 9**9) % 97)",
    ).replace("def ring", "SYSTEM = random.SystemRandom()\n\n\ndef ring")
    (found,) = verdicts([("ring_all_reduce", source)])
    assert not found["right"]


def test_what_a_file_prints_is_kept_for_each_rank_and_limited():
    source = SEND_FIRST.replace("    me, n", "    print('begins')\n    me, n", 1)
    (found,) = verdicts([("ring_all_reduce", source)])
    assert found["printed"] == "".join(f"rank {r}: begins\n" for r in range(4))
    flood = source.replace("print('begins')", "print('x' * (17 << 20))")
    (found,) = verdicts([("ring_all_reduce", flood)])
    assert "prints or writes more than 16 MB (line 7)" in found["words"]


def test_a_loop_at_the_top_of_a_file_or_in_a_schedule_is_stopped():
    if sys.version_info < (3, 12):
        pytest.skip("Python tells of jumps from 3.12 on; the browser's tests have it")
    inside = "def gpipe(ranks, micro_batches):\n    while True:\n        pass\n"
    found = verdicts([("gpipe", "while True:\n    pass\n"), ("gpipe", inside)])
    assert all("an endless loop" in one["words"] for one in found)


def test_ranks_in_different_collectives_all_raise_that_come_in_any_order():
    program = """
import torch.distributed as dist
from xtrain.practice.replay_ranks import Ranks
def program():
    numbers = torch.zeros(3 if dist.get_rank() == 1 else 2)
    dist.all_reduce(numbers)
try:
    Ranks(3).run(program)
except Exception as error:
    found = [type(report.exception).__name__ for report in error.reports]
"""
    assert in_page(program) == ["MismatchedCollectives"] * 3
