"""Mistakes are a ValueError on every rank that names the values, and nothing is sent.

First mistakes that every rank makes alike, as one program does; then, under
`debug_checks`, mistakes of one rank alone. Afterwards the group works as before.
"""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.devices import device_type
from xtrain import comm

ALL_REDUCES = (
    comm.all_reduce,
    comm.ring_all_reduce,
    comm.tree_all_reduce,
    comm.halving_doubling_all_reduce,
    comm.parameter_server_all_reduce,
    comm.one_shot_all_reduce,
)
ROOTED = ("broadcast", "broadcast_naive", "reduce", "gather", "scatter")


def verdict(call, match: str, ledger: comm.CommLedger) -> str | None:
    """None for the right ValueError and nothing sent, else what `call` did."""
    before = len(ledger.events)
    try:
        call()
    except ValueError as error:
        if not re.search(match, str(error), re.DOTALL):
            return f"message {str(error)!r} does not match {match!r}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    else:
        return "did not raise"
    if len(ledger.events) > before:
        return f"communicated first: {ledger.events[before:]}"
    return None


def assert_group_works(group=None) -> None:
    tensor = torch.ones(3)
    comm.ring_all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size(group)] * 3


def run_cases(cases) -> list[str]:
    """Run (name, call, match) in turn; return the first failure."""
    with comm.CommLedger() as ledger:
        for name, call, match in list(cases()):
            fault = verdict(call, match, ledger)
            if fault is not None:
                return [f"{name}: {fault}"]  # the ranks may be out of step now
    assert_group_works()
    return []


def assert_all_caught(world, cases) -> None:
    for rank, problems in enumerate(world.run(run_cases, cases)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems)


def reductions():
    """Every function that takes a reduce op, as f(tensor, op)."""
    size = dist.get_world_size()
    for function in ALL_REDUCES:
        yield function.__name__, function
    yield "reduce", lambda t, op: comm.reduce(t, 0, op)
    yield "reduce_scatter", lambda t, op: comm.reduce_scatter(t, [t] * size, op)
    yield (
        "ring_reduce_scatter",
        lambda t, op: comm.ring_reduce_scatter(t, torch.stack([t] * size), op),
    )
    yield (
        "hierarchical",
        lambda t, op: comm.hierarchical_all_reduce(t, op, *hierarchy()),
    )


def collectives():
    """Every function, as f(tensor) with all other arguments right."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for name, reduction in reductions():
        yield name, lambda t, f=reduction: f(t, ReduceOp.SUM)
    yield "broadcast", lambda t: comm.broadcast(t, 0)
    yield "broadcast_naive", lambda t: comm.broadcast_naive(t, 0)
    yield "gather", lambda t: comm.gather(t, [t] * size if rank == 0 else None)
    yield "scatter", lambda t: comm.scatter(t, [t] * size if rank == 0 else None)
    yield "all_gather", lambda t: comm.all_gather([t] * size, t)
    yield "ring_all_gather", lambda t: comm.ring_all_gather(torch.stack([t] * size), t)
    yield "all_to_all", lambda t: comm.all_to_all([t] * size, [t] * size)
    yield (
        "all_to_all_single",
        lambda t: comm.all_to_all_single(
            torch.stack([t] * size), torch.stack([t] * size)
        ),
    )
    yield "isend", lambda t: comm.isend(t, (rank + 1) % size)
    yield "irecv", lambda t: comm.irecv(t, (rank + 1) % size)
    yield "send", lambda t: comm.send(t, (rank + 1) % size)
    yield "recv", lambda t: comm.recv(t, (rank + 1) % size)
    yield "exchange", lambda t: comm.exchange(t, 0, t.clone(), 0)
    yield "ring_shift", lambda t: comm.ring_shift(t, t.clone())


ALONE = {}  # by default group: this rank's group of one


def hierarchy():
    """Two groups that any world size offers: this rank alone, and everyone."""
    world = dist.group.WORLD
    if world not in ALONE:
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
        ALONE[world] = alone[dist.get_rank()]
    return ALONE[world], world


def wrong_tensors():
    for name, call in collectives():
        if torch.device("meta") not in dist.group.WORLD._device_types:
            yield f"{name} meta", partial(call, torch.ones(4, device="meta")), "meta"
        complex_ = torch.ones(4, dtype=torch.complex64)
        yield f"{name} complex", partial(call, complex_), "complex"
        if name in ("ring_reduce_scatter", "ring_all_gather", "all_to_all_single"):
            continue  # stacking a sparse tensor already fails
        if device_type() == "xgpu":
            continue  # has dense tensors only
        yield f"{name} sparse", partial(call, torch.ones(4).to_sparse()), "sparse"


def wrong_ops():
    ones, float8 = torch.ones(4), torch.ones(4).to(torch.float8_e5m2)
    cases = [
        (torch.ones(4, dtype=dtype), ReduceOp.AVG, rf"AVG.*{dtype}")
        for dtype in (torch.int64, torch.uint8, torch.bool)
    ]
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        cases.append((ones, op, rf"{op.name}.*torch.float32"))
    for op in (ReduceOp.PREMUL_SUM, "sum", None, 0, dist.group.WORLD):
        cases.append((ones, op, "SUM"))
    cases.append((float8, ReduceOp.SUM, "SUM.*float8_e5m2"))
    cases.append((torch.ones(1).expand(4), ReduceOp.SUM, "memory"))
    for name, call in reductions():
        for tensor, op, match in cases:
            yield f"{name} {op} {match}", partial(call, tensor, op), match


def rooted(name, **where):
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.ones(2)
    if name in ("gather", "scatter"):
        pieces = [torch.ones(2) for _ in range(size)] if rank == 0 else None
        return getattr(comm, name)(tensor, pieces, **where)
    return getattr(comm, name)(tensor, **where)


def wrong_roots():
    size, two = dist.get_world_size(), torch.ones(2)
    for name in ROOTED:
        end = "dst" if name in ("reduce", "gather") else "src"
        cases = [({end: 1, f"group_{end}": 0}, rf"{end}=1.*group_{end}=0")]
        for wrong in (size, -1, 99):
            cases.append(({end: wrong}, rf"{end}={wrong}.*\[0"))
            cases.append(({f"group_{end}": wrong}, rf"group_{end}={wrong}"))
        for wrong in (ReduceOp.SUM, ReduceOp.AVG, True, 0.0, "0"):
            cases.append(({end: wrong}, rf"{end}=.*{wrong}"))
        if name not in ("gather", "scatter"):  # there torch's default is 0
            cases.append(({}, f"{end}=None"))
        for where, match in cases:
            yield f"{name} {where}", partial(rooted, name, **where), match
    for call, end in ((comm.send, "dst"), (comm.recv, "src")):
        for wrong in (size, -1, ReduceOp.SUM):
            match = f"{end}=.*{wrong}"
            yield f"{call.__name__} {wrong}", partial(call, two, **{end: wrong}), match
        yield f"{call.__name__} nobody", partial(call, two), f"{end}=None"
    exchange, twin = partial(comm.exchange, two), torch.ones(2)
    yield "exchange with a stranger", partial(exchange, size, twin, 0), f"dst={size}"
    yield "exchange from a stranger", partial(exchange, 0, twin, 77), "src=77"
    strangers = partial(comm.exchange_all, [(two, size)], [(twin, 0)])
    yield "exchange_all with a stranger", strangers, f"{size}"


def ring_all_gather(part, whole):
    comm.ring_all_gather(whole, part)


def wrong_shapes():
    size, rank = dist.get_world_size(), dist.get_rank()
    two, three, long = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int64)
    twos, threes = ([torch.ones(n) for _ in range(size)] for n in (2, 3))
    mixed, unequal = "float32.*int64|int64.*float32", r"\[3\].*\[2\]"
    for run in (comm.ring_reduce_scatter, ring_all_gather):
        for whole, match in (
            (torch.ones(2 * size + 1), rf"\[{2 * size + 1}\].*{size}.*\[2\]"),
            (torch.ones(2 * size, dtype=torch.int64), mixed),
            (torch.ones(2 * size, device="meta"), "meta"),
        ):
            yield f"{run.__name__} {match}", partial(run, two, whole), match
    itself = rf"^all_to_all: rank {rank} sends \[\[2\]\] to itself as \[\[3\]\]"
    for run, first, second, match in (
        (comm.all_gather, [two] * (size + 1), two, f"{size + 1}.*{size}"),
        (comm.all_gather, threes, two, unequal),
        (comm.all_gather, twos, long, mixed),
        (comm.reduce_scatter, two, [two] * (size - 1), f"{size - 1}.*{size}"),
        (comm.reduce_scatter, two, [three] * size, unequal),
        (comm.reduce_scatter, two, [long] * size, mixed),
        (comm.all_to_all, [two] * size, [two] * (size + 1), f"{size + 1}"),
        (comm.all_to_all, threes, [two] * size, itself),
        (comm.all_to_all, twos, [long] * size, mixed),
    ):
        yield f"{run.__name__} {match}", partial(run, first, second), match
    if size > 1:
        elsewhere = [two] * size if rank != 0 else None
        for run in (comm.gather, comm.scatter):
            match = f"{run.__name__}_list"
            yield f"{match} on a wrong rank", partial(run, two, elsewhere), match


def wrong_splits():
    size, single = dist.get_world_size(), comm.all_to_all_single
    rows, even = torch.ones(2 * size, 3), [2] * size
    for out_splits, in_splits, match in (
        (even, [3, *even[1:]], rf"sum to {2 * size + 1}.*{2 * size} rows"),
        ([1] * size, even, rf"sum to {size}.*{2 * size} rows"),
        (even, [2 * size], rf"input_split_sizes.*{size} sizes"),
        ([*even, 0], even, rf"output_split_sizes.*{size} sizes"),
        (even, [-1, 2 * size + 1] + [0] * (size - 2), "negative"),
    ):
        if size > 1:
            call = partial(single, rows.clone(), rows, out_splits, in_splits)
            yield f"splits: {match}", call, match
    odd, ints = torch.ones(2 * size + 1), torch.ones(size, dtype=torch.int32)
    wider = rf"\[{2 * size}, 4\].*\[{2 * size}, 3\]"
    for output, input, match in (
        (odd.clone(), odd, rf"{2 * size + 1} rows.*{size} ranks")
        if size > 1
        else (torch.ones(2), torch.ones(3), r"\[3\].*\[2\]"),
        (rows, torch.ones(2 * size, 4), wider),
        (torch.tensor(1.0), torch.tensor(1.0), "dimension"),
        (torch.ones(size), ints, "float32.*int32|int32.*float32"),
    ):
        yield f"rows: {match}", partial(single, output, input), match
    for sizes in ([1] * (2 * size), []):
        yield f"{sizes}", partial(comm.exchange_split_sizes, sizes), f"{size}"


def wrong_landings():
    """Buffers that could not be filled in place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    strided, four, one = torch.ones(4, 2)[:, 0], torch.ones(4), torch.ones(1)
    peer, gaps = (rank + 1) % size, r"contiguous.*\[2\]"
    yield "irecv", partial(comm.irecv, strided, peer), r"contiguous.*strides \[2\]"
    yield "exchange", partial(comm.exchange, four, peer, strided, peer), gaps
    many = partial(comm.exchange_all, [(strided, peer)], [(four, peer)])
    yield "exchange_all", many, gaps
    expanded, long = one.expand(4), one.expand(4 * size)
    pieces = [four] * size if rank == 0 else None
    for call in (
        partial(comm.broadcast, expanded, 0),
        partial(comm.recv, expanded, peer),
        partial(comm.scatter, expanded, pieces),
        partial(comm.all_gather, [expanded] * size, four),
        partial(comm.ring_all_gather, long, four),
        partial(comm.all_to_all, [expanded] * size, [four] * size),
        partial(comm.all_to_all_single, long, long),
    ):
        yield f"{call.func.__name__} expanded", call, "memory"


def wrong_hierarchies():
    _, everyone = hierarchy()
    run = partial(comm.hierarchical_all_reduce, torch.ones(3))
    yield "no groups", run, "intra_group=None"
    yield "one group", partial(run, intra_group=everyone), "inter_group=None"
    yield "other group", partial(run, inter_group=everyone), "intra_group=None"
    if dist.get_world_size() > 1:
        twice = partial(run, intra_group=everyone, inter_group=everyone)
        yield "twice the same ranks", twice, r"\[0, 1"


CASES = [
    wrong_tensors,
    wrong_ops,
    wrong_roots,
    wrong_shapes,
    wrong_splits,
    wrong_landings,
    wrong_hierarchies,
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases.__name__)
@pytest.mark.verifies(
    "xtrain.comm.calls:check_call",
    "xtrain.comm.local_checks:check_tensor",
    "xtrain.comm.local_checks:check_messages",
    "xtrain.comm.local_checks:check_peer",
    "xtrain.comm.local_checks:local_problem",
    "xtrain.comm.local_checks:_problem_of_tensors",
    "xtrain.comm.local_checks:_problem_of_op",
    "xtrain.comm.local_checks:_overlap",
    "xtrain.comm.local_checks:_can_combine",
    "xtrain.comm.rooted:_list_on_root",
    "xtrain.comm.all_to_all:_split_problems",
    "xtrain.comm.p2p:group_rank_of",
)
def test_every_rank_makes_the_same_mistake(world, cases, size):
    assert_all_caught(world(size), cases)
