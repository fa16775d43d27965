"""torch.distributed as files of the drills call it; the ranks are those of a replay."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.tensors import Tensor, of_values
from torch.utils._python_dispatch import called
from xtrain.practice.outcomes import line_here

ENGINE: list[Any] = []
"""The ranks that run now, as the last entry."""


@contextlib.contextmanager
def serve(ranks: Any) -> Iterator[None]:
    """In this block calls go to these ranks."""
    ENGINE.append(ranks)
    WORLD.ranks[:] = range(ranks.size)
    try:
        yield
    finally:
        ENGINE.pop()


class ProcessGroup:
    """Some ranks, by their global numbers."""

    def __init__(self, ranks: Sequence[int], name: str):
        self.ranks, self.name = list(ranks), name

    def in_words(self) -> str:
        if self is WORLD:
            return ""
        return f" in group {', '.join(map(str, self.ranks))}"

    def rank(self) -> int:
        return get_rank(self)

    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: Any) -> "ProcessGroup":
        return self


WORLD = ProcessGroup([], "world")


class group:
    """The default group."""

    WORLD = WORLD


class GroupMember:
    """The default group, and what those outside of a new one get."""

    WORLD = WORLD
    NON_GROUP_MEMBER = -100


class Work:
    """The type of a call under way."""


class ReduceOp:
    """Operations of a reduction."""

    SUM, AVG, PRODUCT, MIN, MAX = "sum", "avg", "product", "min", "max"
    RedOpType = str


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(ENGINE)


def get_backend(group: Any = None) -> str:
    return "gloo"


def init_process_group(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the group is there already: a drill is called on every rank")


def destroy_process_group(*args: Any) -> None:
    init_process_group()


def engine() -> Any:
    if not ENGINE:
        raise ValueError("Default process group has not been initialized")
    return ENGINE[-1]


def of(group: Any) -> ProcessGroup:
    engine()
    return WORLD if group is None else group


def me() -> int:
    return int(engine().current.number)


def get_rank(group: Any = None) -> int:
    ranks = of(group).ranks
    return ranks.index(me()) if me() in ranks else -1


def get_world_size(group: Any = None) -> int:
    ranks = of(group).ranks
    return len(ranks) if me() in ranks else -1


def get_process_group_ranks(group: Any) -> list[int]:
    return list(of(group).ranks)


def get_global_rank(group: Any, group_rank: int) -> int:
    ranks = of(group).ranks
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"Group rank {group_rank} is not part of group")
    return ranks[group_rank]


def get_group_rank(group: Any, global_rank: int) -> int:
    if global_rank not in of(group).ranks:
        raise ValueError(f"Global rank {global_rank} is not part of group")
    return of(group).ranks.index(global_rank)


def new_group(ranks: Any = None, **_: Any) -> ProcessGroup:
    """A group of these ranks; all ranks call it."""
    current = engine().current
    current.groups += 1
    chosen = list(WORLD.ranks) if ranks is None else sorted(ranks)
    return ProcessGroup(chosen, f"{current.groups}: {chosen}")


# -- messages --


def peer_of(peer: Any, inside: Any, group: Any, what: str) -> int:
    """The global rank of the other end; torch's errors."""
    if (peer is None) == (inside is None):
        raise ValueError(f"one of {what} and group_{what} must be given")
    found = get_global_rank(group, inside) if peer is None else int(peer)
    get_group_rank(group, found)
    if found == me():
        raise ValueError(
            f"Invalid {what} rank: it should not be the same as the rank of the "
            f"current process."
        )
    return found


def tensor_given(tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `tensor` to be of type "
            f"torch.Tensor but got {type(tensor)} instead."
        )


def isend(
    tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0,
    group_dst: Any = None, line: int = 0,
) -> Any:  # fmt: skip
    tensor_given(tensor)
    peer, line = peer_of(dst, group_dst, group, "dst"), line or line_here()
    return called(
        "send", ([tensor], group, peer, tag),
        lambda: engine().message("send", tensor, peer, tag, of(group), line),
    )  # fmt: skip


def irecv(
    tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0,
    group_src: Any = None, line: int = 0,
) -> Any:  # fmt: skip
    tensor_given(tensor)
    anyone = src is None and group_src is None
    peer = None if anyone else peer_of(src, group_src, group, "src")
    line = line or line_here()
    name = "recv_any_source_" if anyone else "recv_"
    return called(
        name, ([tensor], group, peer, tag),
        lambda: engine().message("recv", tensor, peer, tag, of(group), line),
    )  # fmt: skip


def send(
    tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0,
    group_dst: Any = None,
) -> None:  # fmt: skip
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0,
    group_src: Any = None,
) -> int:  # fmt: skip
    work = irecv(tensor, src, group, tag, group_src)
    work.wait()
    return int(getattr(getattr(work, "call", None), "peer", 0) or 0)


@dataclass
class P2POp:
    """A message of a batch."""

    op: Any
    tensor: Tensor
    peer: Any = None
    group: Any = None
    tag: int = 0
    group_peer: Any = None

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise ValueError(
                "Invalid ``op``. Expected ``op`` to be of type ``isend`` or ``irecv``."
            )
        tensor_given(self.tensor)
        peer_of(self.peer, self.group_peer, self.group, "peer")
        self.line = line_here()


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Any]:
    if not p2p_op_list:
        raise ValueError("Invalid ``p2p_op_list``: it is empty")
    return [
        op.op(op.tensor, op.peer, op.group, op.tag, op.group_peer, op.line)
        for op in p2p_op_list
    ]


# -- collectives --


def finished(work: Any, async_op: bool) -> Any:
    """The work, or nothing once it has ended."""
    if async_op:
        return work
    work.wait()
    return None


def collective(
    name: str, args: Any, given: Sequence[Tensor], taken: Sequence[Tensor], group: Any,
    signature: Any, combine: Callable[..., Any], async_op: bool, shown: str = "",
    seconds: float = 1.0,
) -> Any:  # fmt: skip
    line = line_here()
    plain = shown or name.strip("_").replace("_base", "")
    work = called(
        name, args,
        lambda: engine().collective(
            plain, of(group), given, taken, signature, combine, line, seconds=seconds
        ),
    )  # fmt: skip
    return finished(work, async_op)


def barrier(group: Any = None, async_op: bool = False) -> Any:
    if not line_here():  # of the check
        return engine().next_phase(of(group))
    return collective(
        "barrier", (), [], [], group, (), lambda given: [[] for _ in given], async_op,
        seconds=0.0,
    )  # fmt: skip


COMBINE: dict[str, Callable[[Any], Any]] = {
    "sum": sum, "max": max, "min": min, "avg": lambda n: sum(n) / len(n),
}  # fmt: skip


def reduced(parts: list[list[Any]], op: str, like: Tensor) -> list[Any]:
    """One list of numbers of many."""
    found = [COMBINE[op](numbers) for numbers in zip(*parts, strict=True)]
    made = of_values(found, (len(found),), like.dtype)
    return made.to(like.dtype).values()


def all_reduce(
    tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False
) -> Any:
    def combine(given: Any) -> Any:
        total = reduced([one[0] for one in given], op, tensor)
        return [[total] for _ in given]

    signature = tensor.numel(), tensor.dtype.name, op
    return collective("allreduce_", ([tensor], group), [tensor], [tensor], group,
                      signature, combine, async_op, "all_reduce")  # fmt: skip


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    def combine(given: Any) -> Any:
        return [[one[0] for one in given] for _ in given]

    signature = tensor.numel(), tensor.dtype.name
    return collective("allgather_", ([tensor_list], [tensor], group), [tensor],
                      tensor_list, group, signature, combine, async_op,
                      "all_gather")  # fmt: skip


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    def combine(given: Any) -> Any:
        whole = [number for one in given for number in one[0]]
        return [[whole] for _ in given]

    signature = input_tensor.numel(), input_tensor.dtype.name
    return collective("_allgather_base_", (output_tensor, input_tensor, group),
                      [input_tensor], [output_tensor], group, signature, combine,
                      async_op, "all_gather_into_tensor")  # fmt: skip


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = "sum", group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    def combine(given: Any) -> Any:
        total = reduced([one[0] for one in given], op, input)
        each = len(total) // len(given)
        return [[total[i * each : (i + 1) * each]] for i in range(len(given))]

    signature = input.numel(), input.dtype.name, op
    return collective("_reduce_scatter_base_", (output, input, group), [input],
                      [output], group, signature, combine, async_op,
                      "reduce_scatter_tensor")  # fmt: skip


def broadcast(
    tensor: Tensor, src: Any = None, group: Any = None, async_op: bool = False,
    group_src: Any = None,
) -> Any:  # fmt: skip
    root = get_global_rank(group, group_src) if src is None else src
    place = get_group_rank(group, root)

    def combine(given: Any) -> Any:
        return [[given[place][0]] for _ in given]

    signature = tensor.numel(), tensor.dtype.name, root
    return collective("broadcast_", ([tensor], group), [tensor], [tensor], group,
                      signature, combine, async_op, "broadcast")  # fmt: skip


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Any = None,
    input_split_sizes: Any = None, group: Any = None, async_op: bool = False,
) -> Any:  # fmt: skip
    size, mine = get_world_size(group), get_rank(group)
    pieces = [] if input_split_sizes is None else list(map(int, input_split_sizes))
    arriving = [] if output_split_sizes is None else list(map(int, output_split_sizes))
    checked_splits(output, arriving, size, "output")
    checked_splits(input, pieces, size, "input")
    sent = [p.values() for p in input.split(pieces or even(input, size))]
    lengths = [p.numel() for p in output.split(arriving or even(output, size))]

    def combine(given: Any) -> Any:
        return [
            [[number for one in given for number in one[r]]] for r in range(len(given))
        ]

    parts = [of_values(v, (len(v),), input.dtype) for v in sent]
    work = collective("alltoall_base_", (output, input, group, arriving, pieces), parts,
                      [output], group, input.dtype.name, combine, True,
                      "all_to_all_single")  # fmt: skip
    assert len(lengths) == size and mine >= 0
    return finished(work, async_op)


def even(tensor: Tensor, size: int) -> list[int]:
    return [len(tensor) // size] * size


def checked_splits(tensor: Tensor, sizes: list[int], size: int, what: str) -> None:
    """torch's errors of splits that do not fit."""
    if sizes and (len(sizes) != size or sum(sizes) != len(tensor)):
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {what} has {len(tensor)} "
            f"rows, its sizes are {sizes}"
        )
    if not sizes and len(tensor) % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor],
    group: Any = None, async_op: bool = False,
) -> Any:  # fmt: skip
    def combine(given: Any) -> Any:
        return [[one[r] for one in given] for r in range(len(given))]

    return collective("alltoall_", (output_tensor_list, input_tensor_list, group),
                      input_tensor_list, output_tensor_list, group, (), combine,
                      async_op, "all_to_all")  # fmt: skip


def reduce(
    tensor: Tensor, dst: Any = None, op: str = "sum", group: Any = None,
    async_op: bool = False, group_dst: Any = None,
) -> Any:  # fmt: skip
    root = get_global_rank(group, group_dst) if dst is None else dst

    def combine(given: Any) -> Any:
        total = reduced([one[0] for one in given], op, tensor)
        ranks = of(group).ranks
        return [
            [total if r == root else one[0]]
            for r, one in zip(ranks, given, strict=True)
        ]

    return collective("reduce_", ([tensor], group), [tensor], [tensor], group,
                      (tensor.numel(), root), combine, async_op, "reduce")  # fmt: skip


def gather(
    tensor: Tensor, gather_list: Any = None, dst: Any = None, group: Any = None,
    async_op: bool = False, group_dst: Any = None,
) -> Any:  # fmt: skip
    def combine(given: Any) -> Any:
        return [[one[0] for one in given] for _ in given]

    return collective("gather_", ([tensor], group), [tensor], gather_list or [], group,
                      tensor.numel(), combine, async_op, "gather")  # fmt: skip


def scatter(
    tensor: Tensor, scatter_list: Any = None, src: Any = None, group: Any = None,
    async_op: bool = False, group_src: Any = None,
) -> Any:  # fmt: skip
    root = get_global_rank(group, group_src) if src is None else src
    place = get_group_rank(group, 0 if root is None else root)

    def combine(given: Any) -> Any:
        return [[part] for part in given[place]]

    return collective("scatter_", ([tensor], group), scatter_list or [], [tensor],
                      group, (), combine, async_op, "scatter")  # fmt: skip
