"""All-to-all: rank i's piece j goes to rank j, who puts it in place i.

    rank 0: a b c        rank 0: a d g
    rank 1: d e f   ->   rank 1: b e h     the transpose of the table of pieces
    rank 2: g h i        rank 2: c f i

Pieces may have different sizes, empty ones included, as in expert parallelism. A
receiver needs the sizes first: `exchange_split_sizes` sends them, by an all-to-all
of N integers. Each rank sends everything but its own piece, (N-1)/N of its input when
pieces are equal.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.calls import check_call, refuse
from xtrain.comm.checks import message_device, rank_and_size, shape_of
from xtrain.comm.p2p import post_all
from xtrain.comm.work import Work


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
) -> None:
    """Send `input_tensor_list[j]` to rank j; receive from rank i into output i."""
    all_to_all_async(output_tensor_list, input_tensor_list, group).wait()


def all_to_all_async(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
) -> Work:
    """`all_to_all` that returns at once, with a `Work` to wait for."""
    rank, size = rank_and_size(group)
    inputs, outputs = list(input_tensor_list or ()), list(output_tensor_list or ())
    counts = (len(outputs), len(inputs))
    own = [shape_of(t) for t in (*inputs[rank : rank + 1], *outputs[rank : rank + 1])]
    check_call(
        "all_to_all", group, *inputs, *outputs, compare=(),
        sends=dict(enumerate(inputs)), receives=dict(enumerate(outputs)),
        rules=[
            (counts == (size, size), f"{counts} outputs and inputs for {size} ranks"),
            (own[:1] == own[1:], f"rank {rank} sends {own[:1]} to itself as {own[1:]}"),
        ],
    )  # fmt: skip
    outgoing = [t.detach().contiguous() for t in inputs]
    buffers = [t.detach().contiguous() for t in outputs]
    # Everyone begins with the next rank, so no receiver is met by all at once.
    order = [(rank + step) % size for step in range(1, size)]
    works = post_all(
        [(outgoing[peer], peer) for peer in order],
        [(buffers[peer], peer) for peer in order],
        group,
    )
    buffers[rank].copy_(outgoing[rank])  # while the messages travel

    def finish() -> None:
        for output, buffer in zip(outputs, buffers, strict=True):
            if not output.is_contiguous():
                output.detach().copy_(buffer)

    return Work(works, finish, keep=outgoing)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """All-to-all of the rows of one tensor.

    The first `input_split_sizes[0]` rows go to rank 0, the next to rank 1, ...;
    `output` is filled in the same way. Without sizes the rows are split evenly.
    """
    all_to_all_single_async(
        output, input, output_split_sizes, input_split_sizes, group
    ).wait()


def all_to_all_single_async(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
) -> Work:
    """`all_to_all_single` that returns at once, with a `Work` to wait for."""
    _, size = rank_and_size(group)
    if not all(isinstance(tensor, Tensor) for tensor in (output, input)):
        check_call("all_to_all_single", group, output, input, compare=())  # raises
    problems = [
        *_split_problems("input", input, input_split_sizes, size),
        *_split_problems("output", output, output_split_sizes, size),
    ]
    if input.shape[1:] != output.shape[1:]:
        problems.append(f"rows differ: {list(input.shape)} and {list(output.shape)}")
    rules = [(False, problem) for problem in problems]
    check_call("all_to_all_single", group, output, input, rules=rules, compare=())
    buffer = output.detach().contiguous()
    work = all_to_all_async(
        list(buffer.split(_splits(output, output_split_sizes, size))),
        list(input.detach().split(_splits(input, input_split_sizes, size))),
        group,
    )
    if output.is_contiguous():
        return work
    return Work([work], lambda: output.detach().copy_(buffer))


def exchange_split_sizes(
    input_split_sizes: list[int],
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> list[int]:
    """Tell every rank how many rows it will get from each: the `output_split_sizes`.

    Args:
        device: of the numbers that are sent; one that the backend serves unless given.
    """
    _, size = rank_and_size(group)
    if len(input_split_sizes) != size:
        message = f"{input_split_sizes} needs {size} sizes"
        refuse("exchange_split_sizes", group, message)
    device = message_device(group) if device is None else device
    counts = torch.tensor(input_split_sizes, dtype=torch.int64, device=device)
    arriving = torch.empty_like(counts)
    all_to_all_single_async(arriving, counts, group=group).wait()
    return arriving.tolist()


def _splits(tensor: Tensor, sizes: list[int] | None, size: int) -> list[int]:
    return [tensor.shape[0] // size] * size if sizes is None else list(sizes)


def _split_problems(
    name: str, tensor: Tensor, sizes: list[int] | None, size: int
) -> list[str]:
    if tensor.dim() == 0:
        return [f"{name} has no rows to split: it has no dimensions"]
    rows = tensor.shape[0]
    if sizes is None:
        return (
            [f"{name}'s {rows} rows do not divide by {size} ranks"]
            if rows % size
            else []
        )
    if len(sizes) != size or min(sizes) < 0:
        return [f"{name}_split_sizes {sizes}: needs {size} sizes, none negative"]
    if sum(sizes) != rows:
        return [
            f"{name}_split_sizes {sizes} sum to {sum(sizes)}, {name} has {rows} rows"
        ]
    return []
