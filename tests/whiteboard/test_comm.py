"""The whiteboard forms of lc1 pass the library forms' tests, inside their limits.

The cases are those of tests/comm. Here stand only the limits (the sum alone, contiguous
tensors) and the library's way of calling a form.
"""

import importlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm.reference import check_all_reduce, check_all_reduce_extras
from tests.comm.test_all_to_all import TABLES, even_and_one_sided, single_cases
from tests.comm.test_collectives import (
    broadcast_cases,
    gather_and_scatter_cases,
    reduce_cases,
)
from tests.comm.test_hierarchical import MESHES, all_cases
from tests.comm.test_hierarchical import groups as node_groups
from tests.comm.test_p2p import exchanges
from tests.comm.test_ring import (
    all_gather_cases,
    halves_make_the_whole,
    in_place_and_gradients,
    reduce_scatter_cases,
)
from xtrain.comm import CommLedger, message_rounds
from xtrain.copying.forms import forms, header
from xtrain.plan import collective_traffic

FLAT = ("contiguous", "offset")
SUMS = (ReduceOp.SUM, ReduceOp.AVG)  # the mean is the sum, divided by the caller
ALL_REDUCES = (
    "ring_all_reduce",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "parameter_server_all_reduce",
    "one_shot_all_reduce",
)
ONE_SENDER = ("broadcast", "reduce", "gather", "scatter")
OTHERS = ("ring_reduce_scatter", "ring_all_gather", "exchange", "all_to_all_single")
SYMBOLS = [
    f"xtrain.whiteboard.comm.{name}:{name}"
    for name in ALL_REDUCES + ONE_SENDER + OTHERS
]


def form(name: str) -> Callable:
    return getattr(importlib.import_module(f"xtrain.whiteboard.comm.{name}"), name)


def divide(tensor, op, *groups) -> None:
    if op == ReduceOp.AVG:
        for group in groups:
            tensor.div_(dist.get_world_size(group))


def all_reduce_named(name: str) -> Callable:
    """The form, called as the library's."""

    def all_reduce(tensor, op=ReduceOp.SUM, group=None):
        answer = form(name)(tensor, group)
        divide(tensor, op, group)
        return answer

    return all_reduce


def exchange(send, dst, recv, src, group=None, group_dst=None, group_src=None):
    """Ranks of the world are global ranks, so here `group_dst` is `dst`."""
    dst, src = (group_dst if dst is None else dst), (group_src if src is None else src)
    return form("exchange")(send, dst, recv, src, group)


def ring_shift(send, recv, shift=1):
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange(send, (rank + shift) % size, recv, (rank - shift) % size)


def broadcast(tensor, src=None, group_src=None):
    return form("broadcast")(tensor, group_src if src is None else src)


def reduce(tensor, dst, op):
    form("reduce")(tensor, dst)
    if dist.get_rank() == dst:
        divide(tensor, op, None)


def gather(tensor, gather_list, dst=0, group_dst=None):
    return form("gather")(tensor, gather_list, dst if group_dst is None else group_dst)


def scatter(tensor, scatter_list, src=0, group_src=None):
    return form("scatter")(
        tensor, scatter_list, src if group_src is None else group_src
    )


def reduce_scatter(output, input, op=ReduceOp.SUM):
    answer = form("ring_reduce_scatter")(output, input)
    divide(output, op, None)
    return answer


def hierarchical(tensor, op=ReduceOp.SUM, intra_group=None, inter_group=None):
    form("hierarchical_all_reduce")(tensor, intra_group, inter_group)
    divide(tensor, op, intra_group, inter_group)


# --- the same cases as the library's --------------------------------------------------


def all_reduce_cases(name: str) -> None:
    all_reduce = all_reduce_named(name)
    check_all_reduce(all_reduce, ops=SUMS, layouts=FLAT)
    check_all_reduce_extras(all_reduce, layouts=FLAT)


def ring_halves() -> None:
    gather, reduce_all = form("ring_all_gather"), form("ring_all_reduce")
    reduce_scatter_cases(reduce_scatter, ops=SUMS, layouts=FLAT)
    all_gather_cases(gather, layouts=FLAT)
    in_place_and_gradients(gather, reduce_scatter)
    halves_make_the_whole(13, reduce_scatter, gather, reduce_all)


def all_to_all_cases() -> None:
    all_to_all_single, size = form("all_to_all_single"), dist.get_world_size()
    single_cases(all_to_all_single, TABLES[size], FLAT)
    if size != 3:
        even_and_one_sided(all_to_all_single)


CASES = {name: partial(all_reduce_cases, name) for name in ALL_REDUCES} | {
    "exchange": partial(exchanges, exchange, ring_shift, empty_sends=True),
    "broadcast": partial(broadcast_cases, broadcast, FLAT),
    "reduce": partial(reduce_cases, reduce, SUMS, FLAT),
    "gather, scatter": partial(gather_and_scatter_cases, gather, scatter, FLAT),
    "ring halves": ring_halves,
    "all_to_all_single": all_to_all_cases,
}
"""What runs on the ranks; some forms are tried together."""
UP_TO_8 = ("ring_all_reduce", "tree_all_reduce", "broadcast", "all_to_all_single")


def sizes_of(case: str) -> tuple[int, ...]:
    if case == "halving_doubling_all_reduce":
        return (1, 2, 4, 8)
    return (1, 2, 3, 4, 8) if case in UP_TO_8 else (1, 2, 3, 4)


def run_case(case: str) -> None:
    CASES[case]()


@pytest.mark.parametrize(
    ("case", "size"), [(case, size) for case in CASES for size in sizes_of(case)]
)
@pytest.mark.verifies(*SYMBOLS)
def test_a_form_equals_one_process(world, case, size):
    world(size).run(run_case, case)


def three_ranks_are_refused() -> None:
    tensor = torch.ones(4)
    with pytest.raises(ValueError, match="3 ranks: this needs a power of two"):
        form("halving_doubling_all_reduce")(tensor)
    assert tensor.tolist() == [1.0] * 4


@pytest.mark.verifies(
    "xtrain.whiteboard.comm.halving_doubling_all_reduce:halving_doubling_all_reduce"
)
def test_halving_doubling_refuses_three_ranks(world):
    world(3).run(three_ranks_are_refused)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.verifies(
    "xtrain.whiteboard.comm.hierarchical_all_reduce:hierarchical_all_reduce"
)
def test_hierarchical_equals_one_process(world, shape):
    world(shape[0] * shape[1]).run(all_cases, shape, hierarchical, SUMS, FLAT)


# --- what they send -------------------------------------------------------------------


def prepared(name: str, numel: int, dtype) -> Callable[[], None]:
    """A call of a form on a full tensor of `numel` elements; the last rank is root."""
    rank, size = dist.get_rank(), dist.get_world_size()
    full = torch.ones(numel, dtype=dtype)
    part = full[: numel // size].clone()
    listed = list(full.tensor_split(size)) if rank == size - 1 else None
    mine = full.tensor_split(size)[rank].clone()
    arguments = {
        "gather": (mine, listed, size - 1),
        "scatter": (mine, listed, size - 1),
        "exchange": (full, (rank + 1) % size, full.clone(), (rank - 1) % size),
        "broadcast": (full, size - 1),
        "reduce": (full, size - 1),
        "ring_reduce_scatter": (part, full),
        "ring_all_gather": (full, part),
        "all_to_all_single": (full.clone(), full),
    }.get(name, (full,))
    if name == "hierarchical_all_reduce":
        arguments = (full, *node_groups((size // 2, 2)))
    return partial(form(name), *arguments)


def events_of(name: str, numel: int, dtype):
    run = prepared(name, numel, dtype)
    with CommLedger() as ledger:
        run()
    return ledger.events


def sent_and_received(events) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kinds = ("send", "recv")
    return tuple(
        tuple(sum(e.nbytes for e in mine if e.kind == kind) for mine in events)
        for kind in kinds
    )


def log2(ranks: int) -> int:
    """Rounded up."""
    return (ranks - 1).bit_length()


SENDS: dict[str, tuple[str, Callable[[int, int], tuple[float, float, int]]]] = {
    "exchange": ("one tensor", lambda n, m: (n * m, m, 1)),
    "broadcast": (
        "N-1 tensors in all, the root ceil(log2 N) of them, in ceil(log2 N) steps",
        lambda n, m: ((n - 1) * m, log2(n) * m, log2(n)),
    ),
    "reduce": (
        "one tensor from each rank but the root, in ceil(log2 N) steps",
        lambda n, m: ((n - 1) * m, m, log2(n)),
    ),
    "gather": (
        "one tensor from each rank but the root, which receives N-1 at once",
        lambda n, m: ((n - 1) / n * m, m / n, 1),
    ),
    "scatter": (
        "N-1 tensors from the root, at once; the other ranks none",
        lambda n, m: ((n - 1) / n * m, (n - 1) / n * m, 1),
    ),
    "ring_all_reduce": (
        "2(N-1)/N of the tensor in 2(N-1) messages",
        lambda n, m: (2 * (n - 1) * m, 2 * (n - 1) / n * m, 2 * (n - 1)),
    ),
    "ring_reduce_scatter": (
        "(N-1)/N of `input` in N-1 messages",
        lambda n, m: ((n - 1) * m, (n - 1) / n * m, n - 1),
    ),
    "ring_all_gather": (
        "(N-1)/N of `output` in N-1 messages",
        lambda n, m: ((n - 1) * m, (n - 1) / n * m, n - 1),
    ),
    "tree_all_reduce": (
        "2(N-1) tensors in all; ceil(log2 N) by the root; 2 ceil(log2 N) steps",
        lambda n, m: (2 * (n - 1) * m, log2(n) * m, 2 * log2(n)),
    ),
    "halving_doubling_all_reduce": (
        "2(N-1)/N of the tensor in 2 log2(N) messages",
        lambda n, m: (2 * (n - 1) * m, 2 * (n - 1) / n * m, 2 * log2(n)),
    ),
    "all_to_all_single": (
        "`input` less this rank's own piece, in N-1 messages, all at once",
        lambda n, m: ((n - 1) * m, (n - 1) / n * m, 1),
    ),
    "parameter_server_all_reduce": (
        "one tensor from each worker, N-1 from the server",
        lambda n, m: (2 * (n - 1) * m, (n - 1) * m, 2 * (n - 1)),
    ),
    "hierarchical_all_reduce": (
        "2(G-1)/G of the tensor in its node of G, 2(K-1)/K of 1/G between K nodes",
        lambda n, m: (n * (1 + (n - 2) / n) * m, (1 + (n - 2) / n) * m, n),
    ),
}
"""What a header says, and what it means for N ranks and a tensor of M bytes: bytes of
all ranks, most bytes of one rank, steps. Nodes have 2 ranks."""


def world_sizes(name: str) -> tuple[int, ...]:
    only = {"halving_doubling_all_reduce": (2, 4, 8), "hierarchical_all_reduce": (4,)}
    return only.get(name, (2, 3, 4))


UNEVEN = (*ONE_SENDER, *ALL_REDUCES[:4])
OPTIONS = {"hierarchical_all_reduce": lambda size: {"local_ranks": 2}} | dict.fromkeys(
    ONE_SENDER, lambda size: {"root": size - 1}
)


@pytest.mark.parametrize("name", SENDS)
@pytest.mark.verifies(*SYMBOLS)
def test_the_header_and_the_plan_give_what_is_sent(world, name):
    """To the byte, also where a tensor of 29 elements is cut into unequal chunks."""
    words, formula = SENDS[name]
    assert header(forms()[name].read_text())["Sends"].startswith(words)
    for size in world_sizes(name):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            events = world(size).run(events_of, name, 48, dtype)
            sent, received = sent_and_received(events)
            total, most, steps = formula(size, 48 * dtype.itemsize)
            assert (sum(sent), max(sent)) == pytest.approx((total, most), abs=1e-9)
            assert sum(received) == sum(sent)
            assert len(message_rounds(events)) == steps
            if dtype == torch.float32:
                check_plan(name, 48, size, events)
        if name in UNEVEN:
            events = world(size).run(events_of, name, 29, torch.float32)
            check_plan(name, 29, size, events)


def check_plan(name: str, numel: int, size: int, events) -> None:
    """Every rank sends what the plan gives for it."""
    if name == "exchange":  # which has no plan
        return
    options = OPTIONS.get(name, lambda size: {})(size)
    algorithm = name.removesuffix("_single")
    plan = collective_traffic(algorithm, numel, size, **options).bytes(4)
    assert sent_and_received(events) == (plan.sent, plan.received)
    steps = plan.rounds
    if name == "parameter_server_all_reduce":  # answers one after the other
        steps += size - 2
    assert len(message_rounds(events)) == steps


@pytest.mark.verifies("xtrain.whiteboard.comm.one_shot_all_reduce:one_shot_all_reduce")
def test_one_shot_is_one_all_to_all_of_n_tensors(world):
    words = header(forms()["one_shot_all_reduce"].read_text())["Sends"]
    assert words.startswith("N-1 times the tensor, in one step")
    for size in (2, 3, 4):
        for events in world(size).run(
            events_of, "one_shot_all_reduce", 6, torch.float32
        ):
            (event,) = events
            assert event.op == "alltoall_base"
            assert event.payload == size * 6 * 4  # one of the rows stays here


def neighbours(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for event in events_of(name, 48, torch.float32):
        assert event.peer == (rank + (1 if event.kind == "send" else -1)) % size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies(
    "xtrain.whiteboard.comm.ring_all_gather:ring_all_gather",
    "xtrain.whiteboard.comm.ring_all_reduce:ring_all_reduce",
    "xtrain.whiteboard.comm.ring_reduce_scatter:ring_reduce_scatter",
)
def test_a_ring_talks_to_its_neighbours_only(world, size):
    for name in ("ring_all_gather", "ring_all_reduce", "ring_reduce_scatter"):
        world(size).run(neighbours, name)


def test_every_form_of_comm_is_tried():
    of_comm = {name for name, path in forms().items() if path.parent.name == "comm"}
    assert of_comm == SENDS.keys() | {"one_shot_all_reduce"}
