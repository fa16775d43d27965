"""Functions that run on every rank: heads in weights, shares of a key gradient."""

import torch
import torch.distributed as dist

from xtrain.model import XtrainConfig
from xtrain.model.attention import Attention
from xtrain.tensor_parallel import ParallelAttention
from xtrain.tensor_parallel.attention import replica_ranks


def whole_attention(heads: int, key_heads: int, hidden: int = 6) -> Attention:
    config = XtrainConfig(
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=4,
    )
    return Attention(config).double()


@torch.no_grad()
def heads_held(heads: int, key_heads: int) -> dict[str, list[int]]:
    """The query, key and value heads in this rank's weights, and who shares them."""
    whole = whole_attention(heads, key_heads)
    for layer in (whole.q_proj, whole.k_proj, whole.v_proj):
        number = torch.arange(len(layer.weight)) // 4  # every row says whose it is
        layer.weight.copy_(number.unsqueeze(-1).expand_as(layer.weight))
    block = ParallelAttention.from_full(whole, head_dim=4)
    held = {
        name: block.get_parameter(f"{name}_proj.weight")[::4, 0].int().tolist()
        for name in "qkv"
    }
    return {**held, "with": replica_ranks(key_heads)}


def shares_of_key_gradient(heads: int, key_heads: int) -> dict[str, float]:
    """How much of the key weight's true gradient this rank has: alone, and summed.

    A share is the inner product with the true gradient over that one's square, so the
    shares of parts that add up to it are 1 together.
    """
    torch.manual_seed(0)
    whole = whole_attention(heads, key_heads)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    whole(x, torch.arange(5)).square().sum().backward()
    assert whole.k_proj.weight.grad is not None
    ranks = dist.get_world_size()
    replicas = ranks // key_heads
    true = whole.k_proj.weight.grad.chunk(key_heads)[dist.get_rank() // replicas]
    found = {}
    for what, together in (("alone", False), ("summed", True)):
        block = ParallelAttention.from_full(whole, head_dim=4)
        if not together:
            block.replicas = 1  # leaves out the sum among replicas
        block(x).square().sum().backward()
        mine = block.k_proj.weight.grad
        assert mine is not None
        found[what] = ((mine * true).sum() / true.square().sum()).item()
        found[f"{what}, error"] = ((mine - true).norm() / true.norm()).item()
    return found
