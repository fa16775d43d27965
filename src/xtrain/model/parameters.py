"""What a parameter's name stands for: its slices, who sums its gradient, first values.

    embed_tokens  lm_head         rows (vocabulary)   cut over "tensor"
    q_proj  gate_proj  up_proj    rows (outputs)      cut over "tensor"
    k_proj  v_proj                rows (heads)        cut, or a head on several ranks
    biases of these               as the rows of their matrices
    o_proj  down_proj             columns (inputs)    cut over "tensor"
    norms  router                 whole
    experts                       experts cut over "expert", and of each the rows of
                                  gate and up, the columns of down over "tensor"

Gradients are summed over "data" and "context" after backward: these ranks have other
tokens. Where there are experts, the data axis is two axes, "expert_data" and "expert":
those of everything but experts are summed over both, those of experts over
"expert_data" alone, as an expert has seen the tokens of all "expert" ranks. Over
"tensor" these are left to sum, in one bucket: norms of slices of the sequence, norms of
heads, and key heads that are fewer than the ranks, among the ranks with the same head.
All other sums over "tensor" are in the layers' backward. Of what several ranks hold
alike (these, all norms, routers) the first one's counts in the norm of all gradients,
and one of them writes it into a checkpoint.

At the start a parameter is drawn whole, in fp32 on the CPU, from a seed made of its
name. A rank takes its slice of that, so every layout, dtype and device starts from the
same model, and no draw depends on the ones before it.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.mesh import REPLICA_AXES
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.attention import key_replicas

TABLES = {"embed_tokens.weight", "lm_head.weight"}
"""Parameters with a row for each token, and maybe rows of padding."""
ROWS = {"q_proj", "gate_proj", "up_proj"}
KEYS = {"k_proj", "v_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
COLUMNS = {"o_proj", "down_proj"}
EXPERT_DIMS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""The inner size of stacked experts; dim 0 counts experts."""
GRADIENT_AXES = (*REPLICA_AXES, "context", "expert")
"""Mesh axes over which gradients are summed after backward."""


def is_summed_over(name: str, axis: str) -> bool:
    """Whether the gradient of the parameter `name` is summed over this axis."""
    return axis in GRADIENT_AXES and not (axis == "expert" and is_of_experts(name))


def sum_axes(
    axes: Collection[str], done: Collection[str], of_experts: bool
) -> tuple[str, ...]:
    """Those of `axes` over which such gradients are summed, but for the `done` ones."""
    name = "experts.weight" if of_experts else ".weight"
    return tuple(a for a in axes if a not in done and is_summed_over(name, a))


def partial_ranks(
    name: str, config: XtrainConfig, rank: int, size: int, sequence_parallel: bool
) -> range:
    """The tensor ranks that hold parts of the gradient of `name` after backward."""
    layer = name.split(".")[-2]
    count = 1
    if layer in KEYS:
        count = key_replicas(config.num_key_value_heads, size)
    elif layer in HEAD_NORMS or (sequence_parallel and layer in NORMS):
        count = size
    first = rank // count * count
    return range(first, first + count)


def is_of_experts(name: str) -> bool:
    """Whether the parameter `name` is stacked experts."""
    return name.split(".")[-2] == "experts"


def placement_of(
    name: str,
    config: XtrainConfig,
    rank: int,
    size: int,
    expert_rank: int = 0,
    expert_size: int = 1,
) -> Placement:
    """Where the parameter `name` is cut, of one tensor rank and one expert rank."""
    if is_of_experts(name):
        within = Placement(EXPERT_DIMS[name.split(".")[-1]], rank, size)
        return Placement(0, expert_rank, expert_size, inner=within)
    place = tensor_placement(name, config, rank, size)
    return place if expert_rank == 0 else replace(place, is_first=False)


def tensor_placement(
    name: str, config: XtrainConfig, rank: int, size: int
) -> Placement:
    """Where a parameter that is not of experts is cut over tensor ranks."""
    layer = name.split(".")[-2]
    if name in TABLES:
        return Placement(0, rank, size, rows=config.padding_from)
    if layer in ROWS:
        return Placement(0, rank, size)
    if layer in COLUMNS:
        return Placement(1, rank, size)
    if layer in KEYS:
        replicas = key_replicas(config.num_key_value_heads, size)
        first = rank % replicas == 0
        return Placement(0, rank // replicas, size // replicas, first)
    return Placement(is_first=rank == 0)


def full_weight(name: str, shape: Sequence[int], seed: int, std: float) -> Tensor:
    """The whole parameter `name` at the start: ones for a norm, zeros for a bias, else
    normal numbers."""
    if name.endswith("norm.weight"):
        return torch.ones(*shape, device="cpu")
    if name.endswith(".bias"):
        return torch.zeros(*shape, device="cpu")
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    return torch.randn(*shape, generator=generator, device="cpu").mul_(std)


def padded(full: Tensor, shape: Sequence[int]) -> Tensor:
    """A full parameter with rows of zeros below, up to this shape."""
    found = full.new_zeros(shape)
    found[: len(full)] = full
    return found


def seed_of(name: str, seed: int) -> int:
    """32 bits, as many as torch's generator on the CPU uses."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
