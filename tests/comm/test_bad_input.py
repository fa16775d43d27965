"""Mistakes are a ValueError on every rank that names the values, and nothing is sent.

First mistakes that every rank makes alike, as one program does; then, under
`debug_checks`, mistakes of one rank alone. Afterwards the group works as before.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

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


def hierarchy():
    """Two groups that any world size offers: this rank alone, and everyone."""
    if not hasattr(hierarchy, "alone"):
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
        hierarchy.alone = alone[dist.get_rank()]
    return hierarchy.alone, dist.group.WORLD


def wrong_tensors():
    for name, call in collectives():
        yield f"{name} meta", lambda f=call: f(torch.ones(4, device="meta")), "meta"
        yield (
            f"{name} complex",
            lambda f=call: f(torch.ones(4, dtype=torch.complex64)),
            "complex",
        )
        if name in ("ring_reduce_scatter", "ring_all_gather", "all_to_all_single"):
            continue  # stacking a sparse tensor already fails
        yield f"{name} sparse", lambda f=call: f(torch.ones(4).to_sparse()), "sparse"


def wrong_ops():
    for name, call in reductions():
        for dtype in (torch.int64, torch.uint8, torch.bool):
            yield (
                f"{name} AVG {dtype}",
                lambda f=call, d=dtype: f(torch.ones(4, dtype=d), ReduceOp.AVG),
                rf"AVG.*{dtype}",
            )
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            yield (
                f"{name} {op.name} float",
                lambda f=call, o=op: f(torch.ones(4), o),
                rf"{op.name}.*torch.float32",
            )
        for op in (ReduceOp.PREMUL_SUM, "sum", None, 0, dist.group.WORLD):
            yield f"{name} {op}", lambda f=call, o=op: f(torch.ones(4), o), "SUM"
        yield (
            f"{name} float8",
            lambda f=call: f(torch.ones(4).to(torch.float8_e5m2), ReduceOp.SUM),
            "SUM.*float8_e5m2",
        )
        yield (
            f"{name} overlapping memory",
            lambda f=call: f(torch.ones(1).expand(4), ReduceOp.SUM),
            "memory",
        )


def rooted(name, **where):
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.ones(2)
    if name in ("gather", "scatter"):
        pieces = [torch.ones(2) for _ in range(size)] if rank == 0 else None
        return getattr(comm, name)(tensor, pieces, **where)
    return getattr(comm, name)(tensor, **where)


def wrong_roots():
    size = dist.get_world_size()
    for name in ROOTED:
        end = "dst" if name in ("reduce", "gather") else "src"
        for wrong in (size, -1, 99):
            yield (
                f"{name} {end}={wrong}",
                lambda n=name, e=end, w=wrong: rooted(n, **{e: w}),
                rf"{end}={wrong}.*\[0",
            )
            yield (
                f"{name} group_{end}={wrong}",
                lambda n=name, e=end, w=wrong: rooted(n, **{f"group_{e}": w}),
                rf"group_{end}={wrong}",
            )
        yield (
            f"{name} both",
            lambda n=name, e=end: rooted(n, **{e: 1, f"group_{e}": 0}),
            rf"{end}=1.*group_{end}=0",
        )
        for wrong in (ReduceOp.SUM, ReduceOp.AVG, True, 0.0, "0"):
            yield (
                f"{name} {end}={wrong!r}",
                lambda n=name, e=end, w=wrong: rooted(n, **{e: w}),
                rf"{end}=.*{wrong}",
            )
        if name not in ("gather", "scatter"):  # there torch's default is 0
            yield f"{name} neither", lambda n=name: rooted(n), f"{end}=None"
    for call, end in ((comm.send, "dst"), (comm.recv, "src")):
        for wrong in (size, -1, ReduceOp.SUM):
            yield (
                f"{call.__name__} {wrong}",
                lambda f=call, e=end, w=wrong: f(torch.ones(2), **{e: w}),
                f"{end}=.*{wrong}",
            )
        yield f"{call.__name__} nobody", lambda f=call: f(torch.ones(2)), f"{end}=None"
    yield (
        "exchange with a stranger",
        lambda: comm.exchange(torch.ones(2), size, torch.ones(2), 0),
        f"dst={size}",
    )
    yield (
        "exchange from a stranger",
        lambda: comm.exchange(torch.ones(2), 0, torch.ones(2), 77),
        "src=77",
    )
    yield (
        "exchange_all with a stranger",
        lambda: comm.exchange_all([(torch.ones(2), size)], [(torch.ones(2), 0)]),
        f"{size}",
    )


def wrong_shapes():
    size, rank = dist.get_world_size(), dist.get_rank()
    two, three, long = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int64)
    on_root = rank == 0

    def only_root(pieces):
        return pieces if on_root else None

    for name, run in (
        (
            "ring_reduce_scatter",
            lambda part, whole: comm.ring_reduce_scatter(part, whole),
        ),
        ("ring_all_gather", lambda part, whole: comm.ring_all_gather(whole, part)),
    ):
        yield (
            f"{name} numel",
            lambda f=run: f(two, torch.ones(2 * size + 1)),
            rf"\[{2 * size + 1}\].*{size}.*\[2\]",
        )
        yield (
            f"{name} dtype",
            lambda f=run: f(two, torch.ones(2 * size, dtype=torch.int64)),
            "float32.*int64|int64.*float32",
        )
        yield (
            f"{name} device",
            lambda f=run: f(two, torch.ones(2 * size, device="meta")),
            "meta",
        )
    yield (
        "all_gather count",
        lambda: comm.all_gather([two] * (size + 1), two),
        f"{size + 1}.*{size}",
    )
    yield (
        "all_gather shape",
        lambda: comm.all_gather([torch.ones(3) for _ in range(size)], two),
        r"\[3\].*\[2\]",
    )
    yield (
        "all_gather dtype",
        lambda: comm.all_gather([torch.ones(2) for _ in range(size)], long),
        "float32.*int64|int64.*float32",
    )
    yield (
        "reduce_scatter count",
        lambda: comm.reduce_scatter(two, [two] * (size - 1)),
        f"{size - 1}.*{size}",
    )
    yield (
        "reduce_scatter shape",
        lambda: comm.reduce_scatter(two, [three] * size),
        r"\[3\].*\[2\]",
    )
    yield (
        "reduce_scatter dtype",
        lambda: comm.reduce_scatter(two, [long] * size),
        "float32.*int64|int64.*float32",
    )
    yield (
        "all_to_all count",
        lambda: comm.all_to_all([two] * size, [two] * (size + 1)),
        f"{size + 1}",
    )
    yield (
        "all_to_all own shape",
        lambda: comm.all_to_all([torch.ones(3) for _ in range(size)], [two] * size),
        rf"^all_to_all: rank {rank} sends \[\[2\]\] to itself as \[\[3\]\]",
    )
    yield (
        "all_to_all dtype",
        lambda: comm.all_to_all([torch.ones(2) for _ in range(size)], [long] * size),
        "float32.*int64|int64.*float32",
    )
    if size > 1:
        yield (
            "gather on a wrong rank",
            lambda: comm.gather(two, [two] * size if not on_root else None),
            "gather_list",
        )
        yield (
            "scatter on a wrong rank",
            lambda: comm.scatter(two, [two] * size if not on_root else None),
            "scatter_list",
        )


def wrong_splits():
    size = dist.get_world_size()
    rows = torch.ones(2 * size, 3)
    single = comm.all_to_all_single
    even = [2] * size
    for name, out_splits, in_splits, match in (
        ("input sum", even, [3, *even[1:]], rf"sum to {2 * size + 1}.*{2 * size} rows"),
        ("output sum", [1] * size, even, rf"sum to {size}.*{2 * size} rows"),
        ("input count", even, [2 * size], rf"input_split_sizes.*{size} sizes"),
        ("output count", [*even, 0], even, rf"output_split_sizes.*{size} sizes"),
        ("negative", even, [-1, 2 * size + 1] + [0] * (size - 2), "negative"),
    ):  # fmt: skip
        if size > 1:
            yield (
                f"splits: {name}",
                lambda o=out_splits, i=in_splits: single(rows.clone(), rows, o, i),
                match,
            )
    yield (
        (
            "rows do not divide",
            lambda: single(torch.ones(2 * size + 1), torch.ones(2 * size + 1)),
            rf"{2 * size + 1} rows.*{size} ranks" if size > 1 else ".",
        )
        if size > 1
        else (
            "own rows",
            lambda: single(torch.ones(2), torch.ones(3)),
            r"\[3\].*\[2\]",
        )
    )
    yield (
        "row shapes",
        lambda: single(torch.ones(2 * size, 3), torch.ones(2 * size, 4)),
        rf"\[{2 * size}, 4\].*\[{2 * size}, 3\]",
    )
    yield "no rows", lambda: single(torch.tensor(1.0), torch.tensor(1.0)), "dimension"
    yield (
        "dtype",
        lambda: single(torch.ones(size), torch.ones(size, dtype=torch.int32)),
        "float32.*int32|int32.*float32",
    )
    yield (
        "too many sizes",
        lambda: comm.exchange_split_sizes([1] * (2 * size)),
        f"{size}",
    )
    yield "no sizes", lambda: comm.exchange_split_sizes([]), f"{size}"


def wrong_landings():
    """Buffers that could not be filled in place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    strided = torch.ones(4, 2)[:, 0]
    peer = (rank + 1) % size
    yield "irecv", lambda: comm.irecv(strided, peer), r"contiguous.*strides \[2\]"
    yield (
        "exchange",
        lambda: comm.exchange(torch.ones(4), peer, strided, peer),
        r"contiguous.*\[2\]",
    )
    yield (
        "exchange_all",
        lambda: comm.exchange_all([(strided, peer)], [(torch.ones(4), peer)]),
        r"contiguous.*\[2\]",
    )
    four, one = torch.ones(4), torch.ones(1)
    expanded, long = one.expand(4), one.expand(4 * size)
    pieces = [four] * size if rank == 0 else None
    for name, call in (
        ("broadcast", lambda: comm.broadcast(expanded, 0)),
        ("recv", lambda: comm.recv(expanded, peer)),
        ("scatter", lambda: comm.scatter(expanded, pieces)),
        ("all_gather", lambda: comm.all_gather([expanded] * size, four)),
        ("ring_all_gather", lambda: comm.ring_all_gather(long, four)),
        ("all_to_all", lambda: comm.all_to_all([expanded] * size, [four] * size)),
        ("all_to_all_single", lambda: comm.all_to_all_single(long, long)),
    ):  # fmt: skip
        yield f"{name} expanded", call, "memory"


def wrong_hierarchies():
    tensor = torch.ones(3)
    _, everyone = hierarchy()
    run = comm.hierarchical_all_reduce
    yield "no groups", lambda: run(tensor), "intra_group=None"
    yield "one group", lambda: run(tensor, intra_group=everyone), "inter_group=None"
    yield "other group", lambda: run(tensor, inter_group=everyone), "intra_group=None"
    if dist.get_world_size() > 1:
        yield (
            "twice the same ranks",
            lambda: run(tensor, intra_group=everyone, inter_group=everyone),
            r"\[0, 1",
        )


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
