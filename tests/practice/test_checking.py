"""What the checker accepts and refuses, and in which words."""

import re
from pathlib import Path

import pytest

from tests.mutate import draw
from xtrain.copying.forms import forms
from xtrain.practice import check, drill, drills, task
from xtrain.practice.checking import Process, compared, ended
from xtrain.practice.judging import alike, keeps_globals, mistakes_of
from xtrain.practice.verdicts import verdict

RING = drill("ring_all_reduce")
FILES = sorted((Path(__file__).parent / "files").glob("*.txt"))
SAID = {
    "adamw__changes_the_gradient": "the weights after 100 steps are torch's: [0] is",
    "all_to_all_single__one_by_one": "it takes 2 rounds of messages instead of 1",
    "flash_attention_forward__all_scores": "2.0 times as many as the form",
    "gather__shared_attribute": "the values came another way than by messages",
    "gpipe__prints_without_end": "prints or writes more than 16 MB (line 6)",
    "gpipe_step__wrong_root": "it is NaN: never written, or computed from such",
    "load_balancing_loss__masks_in_place": "its gradient: [",
    "naive_data_parallel__own_order": "rank 1: all_reduce([32] float64, SUM) (line 25)",
    "one_f_one_b__names": "max() arg is an empty sequence",
    "online_softmax__memory": "an endless loop (line ",
    "overlapped_all_to_all__waits_at_once": "it takes 16 seconds instead of 9",
    "parameter_server_all_reduce__hang": "recv([1] float64, src=1) (line 16) waits",
    "ring_all_gather__both_ways": "2.00 times as many",
    "ring_all_gather__xor_peers": "Right on 1 rank, 2 ranks, 4 ranks",
    "ring_all_reduce__endless_loop": "an endless loop (line ",
    "ring_all_reduce__global_box": "other ranks do not see your globals",
    "ring_all_reduce__library": "Line 7 calls a collective of torch.distributed",
    "ring_all_reduce__through_rank_0": "rank 0 sends 15,360 bytes",
    "ring_reduce_scatter__last_rank_raises": "On 3 ranks: rank 2 raises IndexError",
    "scatter__forgotten_wait": "never waited for: send(",
    "tree_all_reduce__counts_twice": "it counts rank 2 2 times",
    "vocab_parallel_cross_entropy__signature": "yours is vocab_parallel_cross_entropy(",
}
"""What the checker tells of a file of a reader, whose mistake is not a known one."""


@pytest.mark.parametrize("name", drills())
def test_a_solution_is_right_on_virtual_ranks(name, process):
    found = compared(drill(name), drill(name).solution, process)
    assert (found.right, found.words) == (True, "Right on virtual ranks.")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fully_sharded", "        self._free()\n        if output.requires_grad:"),
        ("fully_sharded", "        self._free()\n        mine = torch"),
        ("zero_2", "        p.grad, own = None, self"),
    ],
)
def test_memory_that_is_not_freed_is_told_of_a_right_file(name, line, process):
    solution = drill(name).solution
    kept = line.replace("        self._free()\n", "").replace(
        "p.grad, own = None, self", "own = self"
    )  # fmt: skip
    assert solution.count(line) == 1
    source = solution.replace(line, kept).replace(
        "        self.optimizer.step()\n",
        "        self.optimizer.step()\n"
        "        for p in self.shards:\n            p.grad = None\n",
    )
    found = compared(drill(name), source, process)
    assert found.right
    assert " times as many as the form, which holds " in found.words


@pytest.mark.verifies("xtrain.practice.checking:check")
@pytest.mark.parametrize("name", ["ring_all_reduce", "zero_1", "one_f_one_b"])
def test_a_solution_is_right_in_four_processes(name):
    found = check(drill(name), drill(name).solution)
    assert found.right, found.words
    assert found.words.startswith("Right: values, bytes and order of messages.")


@pytest.mark.parametrize("name", drills())
def test_a_known_mistake_is_told_in_its_own_words_and_twice_the_same(name, process):
    one, known = drill(name), mistakes_of(drill(name))
    assert known and len({mistake.words for mistake in known}) == len(known)
    right, behaviours = process.outcomes(one, one.solution), []
    for mistake in known:
        planted = mistake.planted(one.solution)
        compile(planted, name, "exec")
        found = process.outcomes(one, planted)
        assert found is None or not verdict(one, found, right).right
        behaviours.append(str(alike(found)))
    assert len(set(behaviours)) == len(known), "each has words of its own"
    again = compared(one, planted, process)
    first = ended(process) if found is None else verdict(one, found, right)
    assert again == first.known(mistake.words, mistake.line_in(planted))


@pytest.mark.slow
@pytest.mark.parametrize("name", drills())
def test_every_known_mistake_twice_by_the_checker(name, process):
    for mistake in mistakes_of(drill(name)):
        planted = mistake.planted(drill(name).solution)
        found = compared(drill(name), planted, process)
        assert (found.right, found.mistake) == (False, mistake.words)
        assert compared(drill(name), planted, process) == found


def test_there_are_drills_and_known_mistakes_enough():
    assert len(drills()) >= 45
    assert sum(len(mistakes_of(one)) for one in drills().values()) >= 120


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_a_reader_is_judged_in_words_that_help(file):
    name, _, rest = file.stem.partition("__")
    found = check(drill(name), file.read_text(), real=False)
    assert found.right == rest.startswith("right"), found.words
    if not found.right:
        assert SAID[file.stem] in found.words


def test_another_file_with_a_known_mistake_is_recognised_with_its_line(process):
    """Other names, other calls: what it does is the same."""
    source = (
        "import torch\nimport torch.distributed as dist\n\n\n"
        "def ring_all_reduce(tensor, group=None):\n"
        "    me, n = dist.get_rank(group), dist.get_world_size(group)\n"
        "    parts = list(tensor.detach().view(-1).tensor_split(n))\n"
        "    for k in range(2 * (n - 1)):\n"
        "        out = parts[(me - 1 - k) % n]\n"
        "        at = (me - 2 - k) % n\n"
        "        got = torch.empty_like(parts[at])\n"
        "        works = [dist.isend(out, group=group, group_dst=(me + 1) % n),\n"
        "                 dist.irecv(got, group=group, group_src=(me - 1) % n)]\n"
        "        for work in works:\n"
        "            work.wait()\n"
        "        parts[at].add_(got)\n"
    )
    found = compared(RING, source, process)
    assert not found.right and "In the all-gather you add what" in found.mistake
    right = source.replace(
        "parts[at].add_(got)", "parts[at][:] = got + parts[at] * (k < n - 1)"
    )
    assert compared(RING, right, process).right


def test_only_a_file_that_keeps_something_is_told_of_globals():
    """`_all_gather = getattr(...)` of the forms is not what is meant."""
    zero = drill("zero_1").solution
    assert "= getattr(" in zero and not keeps_globals(zero)
    for kept in ("box = {}", "box: dict = {}", "box = dict()", "box = [None]"):
        assert keeps_globals(f"{kept}\n{zero}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def ring_all_reduce(tensor, group=None:\n", "SyntaxError: .* \\(line 1\\)"),
        ("x = 1\n", "the file has no ring_all_reduce"),
        ("from xtrain.comm import ring_all_reduce\n", "Line 1 imports xtrain"),
        ("import nowhere_else\n", "ModuleNotFoundError: .*nowhere_else.* \\(line 1\\)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 \\(line 2\\)"),
        ("import os\nos._exit(3)\n", "ended its own process \\(exit status 3\\)"),
    ],
)
def test_a_file_that_cannot_be_executed(source, said):
    found = check(RING, source)
    assert not found.right and re.search(said, found.words), found.words


def test_a_process_that_cannot_be_interrupted_is_ended():
    stuck = "def ring_all_reduce(tensor, group=None):\n    sum(range(10**13))\n"
    with Process(seconds=10) as process:
        found = compared(RING, stuck, process)
    assert not found.right
    assert "did not end within 10 seconds" in found.words


@pytest.mark.slow
def test_mutants_of_the_solutions_are_refused(process):
    """At least 95 % of 30 drawn ones; what a mutant leaves as it was does not count."""
    by_path = {one.path: one for one in drills().values()}
    accepted = [
        mutant
        for mutant in draw(sorted(forms().values()), 30, seed=1)
        if compared(by_path[mutant.file], mutant.source, process).right
    ]
    assert len(accepted) <= 1, "\n".join(map(str, accepted))


def test_a_task_of_each_level_can_be_executed_and_is_not_solved(process):
    for level, said in (
        ("gap", "there is a gap to fill"),
        ("body", "there is a gap to fill"),
        ("blank", "the file has no ring_all_reduce"),
    ):
        found = compared(RING, task(RING, level), process)
        assert not found.right and said in found.words


@pytest.mark.verifies("xtrain.practice.tasks:task")
@pytest.mark.parametrize("name", drills())
def test_a_task_shows_less_from_level_to_level(name):
    one = drill(name)
    gap, body, blank = (task(one, level) for level in ("gap", "body", "blank"))
    for text in (gap, body, blank):
        compile(text, name, "exec")
    assert len(gap) > len(blank)
    assert gap.count("raise NotImplementedError") == 1
    lines = {line.strip() for line in gap.splitlines()}
    missing = [x for x in one.solution.splitlines() if x.strip() not in lines]
    assert 1 <= len(missing) <= 12
    assert "raise NotImplementedError" in body and "raise" not in blank


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="level='easy' is not one of gap, body, blank"):
        task(RING, "easy")


def test_an_unknown_drill_names_the_nearest():
    with pytest.raises(ValueError, match="no drill 'ring_reduce'; nearest: .*ring_"):
        drill("ring_reduce")
