"""Norm, SwiGLU and attention cut over ranks, against the model's whole ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    mine,
    on_group,
    random_of,
)
from xtrain.model import RopeScaling, XtrainConfig
from xtrain.model.layer import Attention, SwiGLU
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
)
from xtrain.tensor_parallel.attention import key_replicas

NORM = "xtrain.tensor_parallel.norm:ParallelRMSNorm"
SWIGLU = "xtrain.tensor_parallel.mlp:ParallelSwiGLU"
ATTENTION = "xtrain.tensor_parallel.attention:ParallelAttention"
RINGS = [
    "xtrain.tensor_parallel.ring_matmul:ring_all_gather_matmul",
    "xtrain.tensor_parallel.ring_matmul:ring_matmul_reduce_scatter",
]
OVERLAPS = {False: (False, True), True: (False, True, "ring")}
"""By whether the sequence is cut."""
SUM = ("xtrain.comm.autograd:identity_sum", "xtrain.comm.autograd:_IdentitySum")


def config_of(heads: int, key_heads: int, inner: int) -> XtrainConfig:
    return XtrainConfig(
        vocab_size=8,
        hidden_size=6,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=4,
        rope_scaling=RopeScaling(factor=5.0, original_max_position_embeddings=120),
    )


def compare(whole, cut, inputs, group, dims: dict[str, int], replicas: int = 1) -> None:
    """Outputs, dX and all weights' gradients, whole or in slices of the sequence.

    `dims`: along which dim each weight is cut; without an entry it is whole.
    """
    x, *rest = inputs
    grad = random_of(77, *x.shape)
    split = getattr(cut, "sequence_parallel", False) or has_sequence_slices(cut)
    here = x.clone().requires_grad_()
    whole.zero_grad()
    y = whole(here, *rest)
    y.backward(grad)

    def slice_of(t):
        return mine(t, 1, group) if split else t

    local = slice_of(x).clone().requires_grad_()
    out = cut(local, *rest)
    close(out, slice_of(y.detach()), "y")
    out.backward(slice_of(grad))
    close(local.grad, slice_of(here.grad), "dX")
    for name, parameter in cut.named_parameters():
        full = whole.get_parameter(name).grad
        if replicas > 1 and name[:2] in ("k_", "v_"):
            full = (
                full.unflatten(0, (-1, 4)).repeat_interleave(replicas, 0).flatten(0, 1)
            )
        expected = mine(full, dims[name], group) if name in dims else full
        close(parameter.grad, expected, name)


def has_sequence_slices(module: nn.Module) -> bool:
    return any(
        isinstance(part, ColumnParallelLinear) and part.sequence_dim is not None
        for part in module.modules()
    )


def blocks(group) -> None:
    size = dist.get_world_size(group)
    x = random_of(5, 3, 2 * size, 6)
    norm = fill(nn.RMSNorm(6, 1e-5))
    swiglu = fill(SwiGLU(config_of(4, 2, 5 * size)))
    rows = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    for split in (False, True):
        cut = ParallelRMSNorm.from_full(norm, group, sequence_parallel=split)
        assert cut.eps == 1e-5
        compare(norm, cut, [x], group, {})
        for overlap in OVERLAPS[split]:
            options = {"sequence_parallel": split, "overlap": overlap}
            inner = ParallelSwiGLU.from_full(swiglu, group, **options)
            compare(swiglu, inner, [x], group, rows)


@pytest.mark.verifies(NORM, SWIGLU, *RINGS)
@ON_GROUPS
def test_norm_and_swiglu_are_those_of_one_device(world, size, members):
    world(size).run(on_group, members, blocks)


def heads_of(size: int):
    """(query heads, key heads): one key head, some on several ranks, one each, more."""
    yield 2 * size, 2 * size
    yield 4 * size, size
    yield 2 * size, 1
    if size == 4:
        yield 8, 2


def attends(group) -> None:
    size = dist.get_world_size(group)
    x, positions = random_of(6, 2, 3 * size, 6), torch.arange(3 * size) * 7
    rows = {f"{n}_proj.weight": 0 for n in "qkv"} | {"o_proj.weight": 1}
    for heads, key_heads in heads_of(size):
        whole = fill(Attention(config_of(heads, key_heads, size)))
        replicas = key_replicas(key_heads, size)
        for split in (False, True):
            for overlap in OVERLAPS[split][1:]:
                options = {"sequence_parallel": split, "overlap": overlap}
                cut = ParallelAttention.from_full(whole, group, **options)
                assert cut.rope_scaling == whole.config.rope_scaling
                compare(whole, cut, [x, positions], group, rows, replicas)


@pytest.mark.verifies(ATTENTION, *SUM, *RINGS)
@ON_GROUPS
def test_attention_is_that_of_one_device_for_any_number_of_key_heads(
    world, size, members
):
    world(size).run(on_group, members, attends)


def replicas_begin_and_stay_equal(steps: int) -> list[torch.Tensor]:
    """Fewer key heads than ranks, trained; this rank's key weight before and after."""
    torch.manual_seed(4)
    block = ParallelAttention(6, 8, 2, 4, dtype=torch.float64)
    kept = [block.k_proj.weight.detach().clone()]
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        block(random_of(step, 1, 5, 6)).square().sum().backward()
        optimizer.step()
    kept.append(block.k_proj.weight.detach().clone())
    return kept


@pytest.mark.verifies(ATTENTION)
def test_replicas_of_a_key_head_begin_equal_and_stay_equal(world):
    ranks = world(4).run(replicas_begin_and_stay_equal, 3)
    for before in range(2):
        assert torch.equal(ranks[0][before], ranks[1][before])
        assert torch.equal(ranks[2][before], ranks[3][before])
        assert not torch.equal(ranks[0][before], ranks[2][before])
    assert not torch.equal(ranks[0][0], ranks[0][1])


def refusals() -> None:
    with pytest.raises(ValueError, match="num_attention_heads: 3 is not divisible by"):
        ParallelAttention(6, 3, 3, 4)
    with pytest.raises(ValueError, match="8 is not divisible by 3"):
        ParallelAttention(6, 8, 3, 4)
    with pytest.raises(ValueError, match="has no head_dim: pass it"):
        ParallelAttention.from_full(nn.Tanh())
    block = ParallelSwiGLU(6, 4)
    with pytest.raises(ValueError, match=r"input \[2, 5\], expected \[..., 6\]"):
        block(torch.ones(2, 5))
    with pytest.raises(ValueError, match="intermediate_size: 5 is not divisible by"):
        ParallelSwiGLU(6, 5)
    biased = fill(SwiGLU(config_of(4, 2, 4)))
    biased.up_proj = nn.Linear(6, 4)
    with pytest.raises(ValueError, match="up_proj has a bias"):
        ParallelSwiGLU.from_full(biased)


@pytest.mark.verifies(ATTENTION, SWIGLU)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(world):
    world(2).run(refusals)


def odd_ranks() -> None:
    with pytest.raises(ValueError, match="2 key heads on 3 ranks"):
        ParallelAttention(6, 6, 2, 4)


@pytest.mark.verifies(ATTENTION)
def test_key_heads_that_neither_divide_nor_are_divided_are_refused(world):
    world(3).run(odd_ranks)
