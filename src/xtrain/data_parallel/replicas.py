"""Replicas: the same model on every rank, before, at the start and after many steps.

    check_model       before   names, shapes, dtypes and options agree
    broadcast_all     start    rank 0's values on every rank
    check_replicas    later    rank 0   digest of every tensor --+
                               rank 1   digest of every tensor --+--> compare

Most mistakes of data parallelism end in weights that differ from rank to rank, while
every rank's loss goes down. Digests are 32 bytes a tensor, whatever its size, and they
compare bits: replicas that take the same steps have no reason to differ in any.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same, problem_of
from xtrain.comm.checks import rank_and_size
from xtrain.comm.wrapper_mesh import Over
from xtrain.comm.wrapper_rules import check_filled, check_options, check_unwrapped


def check_model(
    module: nn.Module,
    over: Over,
    owner: str,
    options: Mapping[str, object],
    *checks: Callable[[], None],
) -> None:
    """ValueError on every rank, before anything is sent, if one rank's is wrong.

    Names, shapes, dtypes and `options` of all ranks must be the same, and no rank's
    `checks` may fail.
    """
    problem = problem_of(
        over.check,
        lambda: check_options(over.reduction, options.get("bucket_cap_mb", 1.0)),
        lambda: check_unwrapped(module, owner),
        lambda: check_filled(named_tensors(module), options.get("device")),
        *checks,
    )
    check_same("models", named_tensors(module), over.group, options, problem)


def broadcast_all(
    tensors: list[Tensor], group: ProcessGroup | None, group_src: int = 0
) -> None:
    """Copy one rank's tensors to all: one broadcast for each dtype and device."""
    kinds: dict[object, list[Tensor]] = {}
    for tensor in tensors:  # .data: graphs of earlier forwards take no notice
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for members in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in members])
        dist.broadcast(flat, group=group, group_src=group_src)
        pieces = flat.split([t.numel() for t in members])
        for tensor, piece in zip(members, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def check_replicas(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """RuntimeError on every rank unless all have the same parameters, bit for bit.

    Call it after a step, every thousand or so: it names the first parameter that
    differs, and the ranks. Buffers are left out: a BatchNorm's may differ between two
    forwards. Costs a pass over the weights and about 100 bytes a parameter.
    """
    check_same("models", named_tensors(module), group)
    names = [name for name, _ in module.named_parameters()]
    mine = [(digest(p), p.detach().double().norm().item()) for p in module.parameters()]
    theirs: list[list[tuple[bytes, float]]] = [[]] * rank_and_size(group)[1]
    dist.all_gather_object(theirs, mine, group=group)
    differing: dict[int, list[int]] = {}
    for number, (right, _) in enumerate(theirs[0]):
        ranks = [r for r, other in enumerate(theirs) if other[number][0] != right]
        if ranks:
            differing[number] = ranks
    if differing:
        first, ranks = next(iter(differing.items()))
        norms = [round(other[first][1], 5) for other in theirs]
        raise RuntimeError(
            f"replicas differ in {len(differing)} of {len(names)} parameters: "
            f"{names[first]} on ranks {ranks} is not rank 0's; its norms, by rank: "
            f"{norms}"
        )


def digest(tensor: Tensor) -> bytes:
    """32 bytes that are the same for the same bits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).digest()


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
