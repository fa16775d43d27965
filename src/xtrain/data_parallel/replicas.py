"""Are the ranks' copies of a model still the same?

    rank 0   digest of every tensor --+
    rank 1   digest of every tensor --+--> all-gather --> compare --> same answer on all

Most mistakes of data parallelism end in weights that differ from rank to rank, while
every rank's loss goes down. Digests are 32 bytes a tensor, whatever its size, and they
compare bits: replicas that take the same steps have no reason to differ in any.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.data_parallel.same_model import check_same_model


def check_replicas(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """RuntimeError on every rank unless all have the same parameters, bit for bit.

    Call it after a step, every thousand or so: it names the first parameter that
    differs, and the ranks. Buffers are not looked at, a BatchNorm's may differ between
    two forwards. Costs a pass over the weights and about 100 bytes a parameter.
    """
    check_same_model(module, group)
    names = [name for name, _ in module.named_parameters()]
    mine = [(digest(p), norm_of(p)) for p in module.parameters()]
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


def norm_of(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()
