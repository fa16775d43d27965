"""A small model, its batches, and what one process makes of them.

An `XtrainModel` with what breaks naive sharding: tied and frozen parameters, odd sizes,
a ModuleList, and a buffer besides. Every rank starts from other weights than the
reference, so that a missing broadcast shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

VOCAB, WIDTH, LAYERS = 13, 7, 3


CONFIG = XtrainConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH + 1,
    num_hidden_layers=LAYERS,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=2,
    tie_word_embeddings=True,
    initializer_range=0.4,
    rms_norm_eps=1.0,  # no small rows blown up: twenty steps agree to the last digits
)


class Model(XtrainModel):
    def __init__(self, seed: int = 0, frozen: bool = False):
        super().__init__(replace(CONFIG, seed=seed))
        torch.manual_seed(seed)
        scale = torch.rand((), device="cpu")  # the same numbers on every device
        self.register_buffer("scale", scale.to(torch.get_default_device()))
        if frozen:
            self.layers[1].mlp.up_proj.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def make_model(seed: int, frozen: bool = False, dtype=torch.float64) -> Model:
    return Model(seed, frozen).to(dtype)


def batch_of(step: int, micro: int, rank: int) -> Tensor:
    """Token ids; ranks have different numbers of rows."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    shape = (2 + (step + rank) % 3, 5)
    tokens = torch.randint(0, VOCAB, shape, generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Summed over tokens: sums of ranks add up to the sum of the whole batch."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def reference(
    size: int,
    steps: int,
    micro_batches: int = 1,
    average: bool = True,
    frozen: bool = False,
    max_norm: float | None = None,
    dtype=torch.float64,
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    | None = None,
) -> dict[str, Tensor]:
    """All ranks' batches in one process with torch's AdamW: the weights afterwards."""
    model = make_model(0, frozen, dtype)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = (make_optimizer or adamw)(trainable)
    for step in range(steps):
        for micro in range(micro_batches):
            for rank in range(size):
                loss = loss_of(model, batch_of(step, micro, rank))
                (loss / (size if average else 1)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trainable, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b), (list(a), list(b))
    return max((a[name] - b[name]).abs().max().item() for name in a)


def wrapped(stage: int, bare: nn.Module, **options: Any) -> tuple[nn.Module, Optimizer]:
    """DDP (stage 0) or a stage of ZeRO around a model, and its AdamW."""
    if stage in (1, 2):
        return bare, ZeroOptimizer(bare.parameters(), AdamW, stage=stage, **options)
    wrap = FullyShardedDataParallel if stage else DistributedDataParallel
    model = wrap(bare, **options)
    return model, AdamW(model.parameters())


def flat_groups(model: FullyShardedDataParallel) -> list[Any]:
    return [group for unit in model.units for group in unit.flat_groups]


def pieces_of(model: FullyShardedDataParallel) -> Iterator[tuple[str, Tensor, slice]]:
    """Of each parameter its name, this rank's piece, and the bounds of that."""
    for group in flat_groups(model):
        for name, piece, slot in zip(
            group.names, group.local_shards, group.layout.slots, strict=True
        ):
            yield name, piece, slice(*group.layout.piece_bounds(slot, group.rank))


def storages(tensors):
    """Bytes of all memory behind some tensors, shared memory once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in found.values())


GROUPS = [[0, 3], [1, 2, 4]]  # of five ranks; most have another rank inside


def my_group():
    """The group of GROUPS that this rank is in: its number, the group, the rank in it.

    Each group trains for itself, beside the other.
    """
    groups = [dist.new_group(members) for members in GROUPS]
    rank = dist.get_rank()
    number = next(n for n, members in enumerate(GROUPS) if rank in members)
    return number, groups[number], GROUPS[number].index(rank)


def reference_of_group(number: int, steps: int, max_norm: float | None = None):
    """What one process makes of a group's batches: the weights afterwards."""
    model, size = make_model(20 + number), len(GROUPS[number])
    optimizer = adamw(model.parameters())
    for step in range(steps):
        for index in range(size):
            (loss_of(model, batch_of(step, number, index)) / size).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}
