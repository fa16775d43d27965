"""What a parameter's name stands for: its slices, who sums its gradient, first values.

    embed_tokens  lm_head         rows (vocabulary)   cut over "tensor"
    q_proj  gate_proj  up_proj    rows (outputs)      cut over "tensor"
    k_proj  v_proj                rows (heads)        cut, or a head on several ranks
    o_proj  down_proj             columns (inputs)    cut over "tensor"
    norms  router                 whole
    experts                       experts cut over "expert", and of each the rows of
                                  gate and up, the columns of down over "tensor"

Gradients are summed over "data" and "context" after backward: these ranks have other
tokens. Where there are experts, the data axis is two axes, "expert_data" and "expert":
those of everything but experts are summed over both, those of experts over
"expert_data" alone, as an expert has seen the tokens of all "expert" ranks. Over
"tensor" nothing is left to sum: the layers do that in backward, also for what several
ranks hold alike: norms, routers, and key heads that are fewer than the ranks. Of those
ranks the first one's counts in the norm of all gradients, and one of them writes it
into a checkpoint.

At the start a parameter is drawn whole, in fp32 on the CPU, from a seed made of its
name. A rank takes its slice of that, so every layout, dtype and device starts from the
same model, and no draw depends on the ones before it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.mesh import REPLICA_AXES
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.attention import key_replicas

ROWS = {"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"}
KEYS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj"}
EXPERT_DIMS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""The inner size of stacked experts; dim 0 counts experts."""
GRADIENT_AXES = (*REPLICA_AXES, "context", "expert")
"""Mesh axes over which gradients are summed after backward."""


def is_summed_over(name: str, axis: str) -> bool:
    """Whether the gradient of the parameter `name` is summed over this axis."""
    return axis in GRADIENT_AXES and not (axis == "expert" and is_of_experts(name))


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
    """The whole parameter `name` at the start: ones for a norm, else normal numbers."""
    if name.endswith("norm.weight"):
        return torch.ones(*shape, device="cpu")
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    return torch.randn(*shape, generator=generator, device="cpu").mul_(std)


def seed_of(name: str, seed: int) -> int:
    """32 bits, as many as torch's generator on the CPU uses."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
