"""Functions that run on every rank for the page on the whole model."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING
from xtrain.context_parallel import all_gather_attention, ulysses
from xtrain.model import XtrainConfig, XtrainModel, gradient_sums
from xtrain.model.context import ATTENTIONS

BATCH, LENGTH, ITEMSIZE = 3, 24, 8  # float64; 24 tokens on 2, 3 and 4 ranks
HEADS, HEAD_DIM, VOCABULARY = 12, 2, 24


def config_of(key_heads: int) -> XtrainConfig:
    """Twelve query heads, so that Ulysses can share them among 2, 3 and 4 ranks."""
    return XtrainConfig(
        vocab_size=VOCABULARY,
        hidden_size=7,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        head_dim=HEAD_DIM,
    )


def model_of(attention: str, key_heads: int) -> XtrainModel:
    mesh = init_mesh((dist.get_world_size(),), ("context",))
    return XtrainModel(
        config_of(key_heads), mesh, context_attention=attention, dtype=torch.float64
    )


def traffic() -> dict[str, dict[str, int]]:
    """`traffic_with` of each attention, with as many key heads as heads, and one."""
    return {
        f"{attention} {key_heads}": traffic_with(attention, key_heads)
        for attention in ATTENTIONS
        for key_heads in (HEADS, 1)
    }


def traffic_with(attention: str, key_heads: int) -> dict[str, int]:
    """Bytes that this rank sends in one layer, around it, and for all gradients.

    Collectives are our rings, which send what the formulas say and let the ledger count
    it.
    """
    model = model_of(attention, key_heads)
    layer, ends = model.layers[0], (model.embed_tokens, model.norm, model.lm_head)
    local = LENGTH // dist.get_world_size()
    torch.manual_seed(0)  # ranks of a context group bring the same tokens
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    x_BSH = torch.randn(BATCH, local, 7, dtype=torch.float64, requires_grad=True)
    with rings():
        found: dict[str, int] = {}
        with sent(found, "forward"):
            out = layer(x_BSH, torch.arange(local))
        with sent(found, "backward"):
            out.sum().backward()
        with sent(found, "ends"):
            x = ends[0](model.context.shard(tokens))
            ends[2](ends[1](x)).sum().backward()
        with sent(found, "gradients"):
            model.sync_gradients()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


@contextmanager
def sent(found: dict[str, int], name: str) -> Iterator[None]:
    """Bytes that this rank sends meanwhile."""
    with CommLedger() as ledger:
        yield
    found[name] = ledger.bytes_sent


@contextmanager
def rings() -> Iterator[None]:
    """Run the collectives of attention and of `sync_gradients` as rings."""
    with ExitStack() as stack:
        attention = sys.modules[all_gather_attention.__module__]
        for module in (attention, ulysses, gradient_sums):
            stack.enter_context(mock.patch.object(module, "TORCH", RING))
        yield


def tokens_held() -> dict[str, list[int]]:
    """With each balance, the positions that this rank's layer computes with."""
    return {balance: positions_of_layer(balance) for balance in BALANCED}


BALANCED = ("none", "striped", "zigzag")
SHOWN = 16  # tokens of the picture


def positions_of_layer(balance: str) -> list[int]:
    """What the first layer is given for a batch of SHOWN tokens."""
    mesh = init_mesh((dist.get_world_size(),), ("context",))
    model = XtrainModel(config_of(12), mesh, context_balance=balance)
    seen: list[int] = []
    model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.extend(args[1].tolist())
    )
    model(torch.zeros(1, SHOWN, dtype=torch.long))
    return seen
