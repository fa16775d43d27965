"""Dropout whose mask does not depend on the number of ranks.

    where                            the activation      the ranks' masks must
    inside: heads, split features    split               differ
    outside                          replicated          be equal
    outside, sequence parallel       split by tokens     differ

The usual way is two states of a generator, one equal on all ranks, one seeded by rank:
`rank_rng` is the second one, for kernels that draw for themselves. But then a model on
4 ranks drops other elements than the same model on 2. Here the mask is a function of
the element's place in the *full* tensor:

    key                one number from torch's CPU generator, equal on all ranks
    random number i    hash(key, i)    i counts through the full tensor
    drop               if it is below p

so each rank computes its slice of one mask, and all three rules hold.
Recomputation (torch.utils.checkpoint) restores the generator, so it gets the same key
and the same mask. Every call takes one draw, whatever a rank holds: ranks of a group
with the same seed keep the same state (data-parallel groups need other seeds). Nothing
is sent. The price: a dozen passes of integer arithmetic over the elements instead of
one call of a generator, and 16 bytes an element while the mask is made; then 1.

Sources: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (numbers from
a counter); Steele et al., Fast Splittable Pseudorandom Number Generators, 2014 (the
hash); Shoeybi et al., Megatron-LM, 2019 (which masks must differ).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.batch_rows import FIRST_ROW
from xtrain.comm.calls import check_call
from xtrain.comm.checks import rank_and_size

# SplitMix64's, as signed numbers: torch multiplies int64 modulo 2 ** 64.
STEP = 0x9E3779B97F4A7C15 - 2**64
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class ParallelDropout(nn.Module):
    """`nn.Dropout` for an activation that is replicated, or split along one dim.

    Args:
        p: the probability that an element becomes 0; the others are divided by 1 - p.
        split_dim: the dim of which a rank holds its slice; None if x is replicated.
    """

    def __init__(
        self,
        p: float = 0.5,
        split_dim: int | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        check_probability(p)
        self.p, self.split_dim, self.group = p, split_dim, group

    def forward(self, x: Tensor) -> Tensor:
        return parallel_dropout(x, self.p, self.training, self.split_dim, self.group)


def parallel_dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    split_dim: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Dropout of this rank's slice of a tensor, with its slice of the full mask.

    Args:
        split_dim: the dim of which a rank holds its slice, all of one size; None if x
            is replicated.
    """
    check_probability(p)
    rank, size = rank_and_size(group)
    full, starts = list(x.shape), [0] * x.dim()
    starts[:1] = [FIRST_ROW.get()] * min(x.dim(), 1)
    if split_dim is not None:
        if not -x.dim() <= split_dim < x.dim():
            raise ValueError(f"split_dim={split_dim}, but the tensor is {full}")
        starts[split_dim] += rank * full[split_dim]
        full[split_dim] *= size
    if not training or p == 0:
        return x
    key = draw_key()
    check_call("parallel_dropout", group, x, compare=[full, p, key], written=[])
    return drop(x, p, key, full, starts)


def drop(
    x: Tensor, p: float, key: int, full: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Dropout of the part at `starts` of a tensor of the shape `full`."""
    keep = keep_mask(key, p, full, starts, x.shape, x.device)
    return torch.where(keep, x, 0) * (1 / (1 - p) if p < 1 else 0)


def draw_key() -> int:
    """One number from torch's CPU generator: equal where the generators are."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))


def keep_mask(
    key: int,
    p: float,
    full: Sequence[int],
    starts: Sequence[int],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which elements stay, of the part at `starts` of a tensor of the shape `full`."""
    counter = torch.tensor(key, device=device)
    for dim, (start, length) in enumerate(zip(starts, shape, strict=True)):
        places = torch.arange(start, start + length, device=device)
        for behind in full[dim + 1 :]:
            places *= behind
        counter = counter.unsqueeze(-1) + places * STEP
    return shift_right(hash_in_place(counter), 32) >= round(p * 2**32)


def hash_in_place(counter: Tensor) -> Tensor:
    """SplitMix64's: 64 bits of each number, of which each changes half of all bits."""
    counter ^= shift_right(counter, 30)
    counter *= MIX[0]
    counter ^= shift_right(counter, 27)
    counter *= MIX[1]
    counter ^= shift_right(counter, 31)
    return counter


def shift_right(x: Tensor, bits: int) -> Tensor:
    """The shift of unsigned numbers: zeros come in on the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@contextmanager
def rank_rng(
    device: torch.device | str = "cpu", group: ProcessGroup | None = None
) -> Iterator[None]:
    """Torch's own random numbers, in this block other ones on each rank of the group.

    For kernels that draw for themselves (attention's dropout_p). The seed is made of
    one number from the CPU generator and the rank. After the block the generators are
    as after that one draw, so all ranks keep the same state, and a recomputation draws
    the same numbers. They depend on the number of ranks.
    """
    rank, _ = rank_and_size(group)
    seed = int(hash_in_place(torch.tensor(rank + 1, device="cpu") * STEP + draw_key()))
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if not on_cpu:
            torch.get_device_module(device).manual_seed(seed)
        yield


def check_probability(p: float) -> None:
    """ValueError unless it is one."""
    if not 0 <= p <= 1:
        raise ValueError(f"p={p} is not a probability between 0 and 1")
