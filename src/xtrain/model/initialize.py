"""Weights that depend on a parameter's name, and on nothing else.

A parameter is drawn whole, in fp32 on the CPU, from a seed made of its name. Whoever
holds a slice of it cuts that slice out, so every layout, dtype and device starts from
the same model, and no draw depends on the ones before it.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


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
