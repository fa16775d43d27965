"""Ranks in different calls are told so; calls that are alike cannot be told apart."""

import contextlib
import inspect
import logging
import logging.handlers
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed import ReduceOp
from typing_extensions import deprecated

from tests.backends.faults import on
from xtrain.backends.calls import BETWEEN, KINDS, NOWHERE, PROGRAM, CollectiveCall
from xtrain.backends.swaps import MAX_CALLS, SwapDetector

# What the tests here prove, for their marks.
ESTABLISHED = (
    "xtrain.backends.peers:Peers",
    "xtrain.backends.peers:PeerMonitor",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
FROM_THE_START = (*ESTABLISHED, "xtrain.backends.rendezvous:Rendezvous")


def wrong_splits(t):
    size = dist.get_world_size()
    sends = [2 + (on(1) and peer == 2) for peer in range(size)]
    source = torch.ones(sum(sends))
    dist.all_to_all_single(torch.empty(2 * size), source, [2] * size, sends)


def extra_call(t):
    if on(1):
        dist.all_reduce(t)
    dist.all_gather([torch.empty_like(t) for _ in range(dist.get_world_size())], t)


def other_output(t):
    """The same elements: one rank wants them in a row, the others in rows."""
    rows = (dist.get_world_size(), len(t))
    dist.all_gather_into_tensor(t.new_empty(rows).view(-1 if on(1) else rows), t)


def other_gather(t):
    into = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.gather(t[:2] if on(1) else t, into if on(0) else None, 0)


MISTAKES = {
    "operation": lambda t: dist.broadcast(t, 0) if on(1) else dist.all_reduce(t),
    "root": lambda t: dist.broadcast(t, 1 if on(1) else 0),
    "extra_call": extra_call,
    "shape": lambda t: dist.all_reduce(t[:3] if on(1) else t),
    "width": lambda t: dist.all_reduce(t.double() if on(1) else t),
    "dtype": lambda t: dist.all_reduce(t.view(torch.int32) if on(1) else t),
    "reduction": lambda t: dist.all_reduce(t, ReduceOp.MAX if on(1) else ReduceOp.SUM),
    "output": other_output,
    "splits": wrong_splits,
    "gather": other_gather,
}


def make_mistake(name: str, length: int) -> str:
    """The error's text; the data is untouched and the group goes on working."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((length,), float(rank))
    with pytest.raises(RuntimeError) as raised:
        MISTAKES[name](tensor)
    assert torch.equal(tensor, torch.full((length,), float(rank)))
    for length in (1, 100_000):
        total = torch.full((length,), float(rank))
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((length,), size * (size - 1) / 2))
    return str(raised.value)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("length", [8, 400_000])
@pytest.mark.verifies(
    *ESTABLISHED, "xtrain.backends.calls:call_site", "xtrain.backends.calls:fingerprint"
)
def test_ranks_in_different_calls_are_all_shown(ours, mistake, length):
    texts = ours(3).run(make_mistake, mistake, length)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert "the ranks of this group are in different calls" in lines[0]
    for rank in range(3):
        where = rf"  rank {rank}: \w+\(.*\).* at .*test_different_calls.py:\d+"
        assert re.fullmatch(where, lines[1 + rank]), lines
    assert lines[1] != lines[2]
    assert "XTRAIN_COMPARE_LINES" not in texts[0]


# ----------------------------------------------------------------- calls that are alike


def in_order(first, second, group) -> None:
    """Two calls, the other way round on rank 1, with one between them."""
    calls = (second, first) if on(1) else (first, second)
    calls[0]()
    dist.all_reduce(torch.ones(1), group=group)
    calls[1]()


def swapped_all_reduce(a, b, group):
    in_order(
        lambda: dist.all_reduce(a, group=group),
        lambda: dist.all_reduce(b, group=group),
        group,
    )


def swapped_reduce_scatter(a, b, group):
    out = a.new_empty(len(a) // dist.get_world_size())
    in_order(
        lambda: dist.reduce_scatter_tensor(out, a, group=group),
        lambda: dist.reduce_scatter_tensor(out, b, group=group),
        group,
    )


def swapped_all_gather(a, b, group):
    out = a.new_empty(len(a) * dist.get_world_size())
    in_order(
        lambda: dist.all_gather_into_tensor(out, a, group=group),
        lambda: dist.all_gather_into_tensor(out, b, group=group),
        group,
    )


def swapped_broadcast(a, b, group):
    in_order(
        lambda: dist.broadcast(a, 0, group=group),
        lambda: dist.broadcast(b, 0, group=group),
        group,
    )


SYMMETRIC = [swapped_all_reduce, swapped_reduce_scatter, swapped_all_gather]
SWAPS = [*SYMMETRIC, swapped_broadcast]


def new_group(compare_lines: str | None) -> dist.ProcessGroup:
    """A group of all ranks, made with this environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XTRAIN_COMPARE_LINES", raising=False)
        if compare_lines is not None:
            patch.setenv("XTRAIN_COMPARE_LINES", compare_lines)
        return dist.new_group(backend=dist.get_backend())


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the backends log meanwhile."""
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("xtrain.backends").addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger("xtrain.backends").removeHandler(handler)


DIST_CALL = re.compile(r" +(lambda: )?dist\.")


def lines_of(function) -> list[str]:
    """Where `function` calls torch.distributed, in order: "this_file.py:12"."""
    source, first = inspect.getsourcelines(function)
    calls = [i for i, line in enumerate(source) if DIST_CALL.match(line)]
    return [f"{Path(__file__).name}:{first + i}" for i in calls]


def swap_compared(swap, length: int) -> str:
    group = new_group("1")
    a, b = torch.full((length,), 1.0), torch.full((length,), 10.0)
    with pytest.raises(RuntimeError) as raised:
        swap(a, b, group)
    assert bool((a == 1).all()) and bool((b == 10).all())
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.parametrize("swap", SYMMETRIC, ids=lambda s: s.__name__)
@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.calls:call_site")
def test_swapped_calls_are_refused_when_lines_are_compared(ours, swap):
    first, second = lines_of(swap)
    for length in (12, 300_000):
        texts = ours(3).run(swap_compared, swap, length)
        assert len(set(texts)) == 1
        lines = texts[0].splitlines()
        for rank, where in enumerate([first, second, first]):
            assert lines[1 + rank].startswith(f"  rank {rank}: "), lines
            assert lines[1 + rank].endswith(f"/{where}"), lines
        assert "Only their lines differ" in lines[4]


def swap_warned_of(swap, length: int) -> list[str]:
    """What is logged while calls are swapped twice; the group goes on."""
    group = new_group(None)
    with logged() as records:
        for _ in range(2):
            swap(torch.ones(length), torch.ones(length), group)
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda s: s.__name__)
@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.swaps:SwapDetector")
def test_swapped_calls_are_warned_of_by_every_rank_once_for_each_line(ours, swap):
    lines = lines_of(swap)
    for length in (12, 300_000):
        for rank, told in enumerate(ours(3).run(swap_warned_of, swap, length)):
            assert len(told) == 2, told
            earlier_and_now = re.findall(r"test_different_calls.py:\d+", told[0])
            assert earlier_and_now == (lines[::-1] if rank == 1 else lines), told
            assert "XTRAIN_COMPARE_LINES=1" in told[0]


def legal_lines(group, length: int) -> None:
    """One call on two lines: in the branches of an `if`, and a call with a root."""
    size, x = dist.get_world_size(), torch.ones(length)
    for _ in range(2):
        if on(0):
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            dist.broadcast(x, 0, group=group)
        else:
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            dist.broadcast(x, 0, group=group)
    assert bool((x == size * size).all())
    for root in range(size):  # every rank comes to both lines, but with its own root
        if on(root):
            dist.broadcast(x, root, group=group)
        else:
            dist.broadcast(x, root, group=group)


def lines_may_differ(compare_lines: str | None) -> list[str]:
    group = new_group(compare_lines)
    with logged() as records:
        for length in (1, 300_000):
            legal_lines(group, length)
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize("compare_lines", [None, "0"])
def test_ranks_may_make_one_call_from_different_lines(ours, compare_lines):
    assert ours(3).run(lines_may_differ, compare_lines) == [[], [], []]


def takes_turns() -> list[str]:
    """Right, though it looks like a swap: one rank after the other gives its tensor."""
    group, size = new_group(None), dist.get_world_size()
    with logged() as records:
        for turn in range(size):
            mine, nothing = torch.full((2,), turn + 1.0), torch.zeros(2)
            if on(turn):
                dist.all_reduce(mine, group=group)
            else:
                dist.all_reduce(nothing, group=group)
            assert (mine if on(turn) else nothing).tolist() == [turn + 1, turn + 1]
    dist.destroy_process_group(group)
    return [record.getMessage() for record in records]


@pytest.mark.verifies(*FROM_THE_START)
def test_ranks_that_take_turns_on_two_lines_are_warned_and_served(ours):
    for told in ours(3).run(takes_turns):
        assert told and all("Are these calls swapped?" in each for each in told)


@pytest.mark.verifies("xtrain.backends.swaps:SwapDetector")
def test_a_program_of_ever_new_calls_from_two_lines_fills_no_memory():
    swaps = SwapDetector(0)
    call = CollectiveCall("all_reduce", None, None, None, NOWHERE)
    for number in range(3 * MAX_CALLS):
        swaps.note(call, [2 * number, 2 * number + 1])
    assert len(swaps._mine) <= MAX_CALLS


def lines_that_are_never_compared() -> None:
    group, x = new_group("1"), torch.ones(2)
    if on(0):
        dist.barrier(group)
        dist.broadcast(x, 0, group=group)
        y = differentiable.all_reduce(x, group=group)
    else:
        dist.barrier(group)
        dist.broadcast(x, 0, group=group)
        y = differentiable.all_reduce(x, group=group)
    assert y.tolist() == [3, 3]
    dist.destroy_process_group(group)


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.filterwarnings("ignore")
def test_calls_with_a_root_barriers_and_those_of_libraries_have_no_line_to_compare(
    ours,
):
    ours(3).run(lines_that_are_never_compared)


def compared_by_one_rank() -> str:
    group = new_group("1" if on(1) else None)
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.verifies(*FROM_THE_START)
def test_a_setting_that_only_some_ranks_have_is_named(ours):
    for text in ours(2).run(compared_by_one_rank):
        assert "Is XTRAIN_COMPARE_LINES set on some ranks only?" in text


def swapped_in_a_loop(a, b, group) -> None:
    """Two orders on one line."""
    for tensor in (b, a) if on(1) else (a, b):
        dist.all_reduce(tensor, group=group)


def swapped_on_lines_of_its_own(a, b, group) -> None:
    """Written like calls that belong together."""
    if on(1):
        dist.all_reduce(b, group=group)
        dist.all_reduce(a, group=group)
    else:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)


def swapped_unnoticed(swap, compare_lines: str | None) -> tuple[float, float]:
    group = new_group(compare_lines)
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    with logged() as records:
        swap(a, b, group)
    dist.destroy_process_group(group)
    assert records == []
    return a.item(), b.item()


@pytest.mark.verifies(*FROM_THE_START)
@pytest.mark.parametrize(
    ("swap", "compare_lines"),
    [
        (swapped_in_a_loop, None),
        (swapped_in_a_loop, "1"),
        (swapped_on_lines_of_its_own, None),
    ],
)
def test_some_swapped_calls_cannot_be_told_from_right_ones(ours, swap, compare_lines):
    """As the page on faults states."""
    wrong = (1.0 + 10.0 + 1.0, 10.0 + 1.0 + 10.0)
    sums = ours(3).run(swapped_unnoticed, swap, compare_lines)
    assert sums == [wrong, wrong[::-1], wrong]


@pytest.mark.verifies(*FROM_THE_START, "xtrain.backends.calls:call_site")
def test_what_is_swapped_on_lines_of_its_own_is_refused_when_lines_are_compared(ours):
    swap = swapped_on_lines_of_its_own
    b_first, _, a_first, _ = lines_of(swap)
    for text in ours(3).run(swap_compared, swap, 12):
        assert text.count(f"/{a_first}") == 2 and text.count(f"/{b_first}") == 1


def through_deprecated() -> list[str]:
    """By `typing_extensions`, as torch 2.13 wraps; Python 3.13 has a wrapper, too."""
    texts = []
    for wrap in (deprecated, getattr(warnings, "deprecated", deprecated)):
        all_reduce = wrap("in tests")(dist.all_reduce)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError) as raised:
                all_reduce(torch.ones(2 if on(1) else 3))
        texts.append(str(raised.value))
    return texts


@pytest.mark.verifies(
    "xtrain.backends.calls:call_site",
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.progress:Progress",
    "xtrain.backends.call_runner:CallRunner",
)
def test_what_wraps_a_deprecated_function_is_not_taken_for_the_line(ours):
    for text in ours(2).run(through_deprecated)[0]:
        assert text.count("/test_different_calls.py:") == 2, text
    for module in ("typing_extensions", "warnings"):
        assert KINDS[module] == BETWEEN
    mine = ("warnings_of_mine", "typing_extensions_too", "torchlike", "__main__")
    assert {KINDS[module] for module in mine} == {PROGRAM}


def wrong_message(take: torch.dtype, count: int) -> str:
    rank = dist.get_rank()
    received = torch.full((count,), 7).to(take)
    before = received.clone()
    text = ""
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        with pytest.raises(RuntimeError) as raised:
            dist.recv(received, 0)
        text = str(raised.value)
        assert torch.equal(received, before)
        after = torch.zeros(2)
        dist.recv(after, 0)
        assert after.tolist() == [1, 1]
    dist.barrier()
    return text


@pytest.mark.parametrize(
    ("take", "count"), [(torch.float32, 3), (torch.float32, 5), (torch.int32, 4)]
)
@pytest.mark.verifies(*ESTABLISHED, "xtrain.backends.messages:Inbox")
def test_a_message_of_another_size_is_refused_by_its_receiver(ours, take, count):
    """The ninth class: nothing is written, the next message arrives."""
    _, text, _ = ours(3).run(wrong_message, take, count)
    line = r" at .*test_different_calls.py:\d+"
    assert re.search(rf"rank 0 sent 16 bytes of float32{line}", text)
    assert re.search(rf"recv\(\[\d\] \w+, src=\[0\]\){line}", text)


def lists_differ(name: str) -> str:
    """On rank 0 the second and the third tensor have changed places."""
    rank = dist.get_rank()
    sizes = [2, 4, 3] if rank == 0 else [2, 3, 4]
    pieces, mine = [torch.ones(n) for n in sizes], torch.full((sizes[rank],), 5.0)
    pair = (mine, pieces) if name == "reduce_scatter" else (pieces, mine)
    with pytest.raises(RuntimeError, match="in different calls") as error:
        getattr(dist, name)(*pair)
    assert mine.tolist() == [5.0] * sizes[rank]
    assert all(bool((piece == 1).all()) for piece in pieces)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3
    return str(error.value)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_every_tensor_of_a_list_is_compared(ours, name):
    texts = ours(3).run(lists_differ, name)
    assert len(set(texts)) == 1
    assert all(f"rank {rank}: {name}(" in texts[0] for rank in range(3))
