"""Dropout: equal or different masks where they must be, and a cut model like a whole.

Ranks are seeded alike, as those of a tensor-parallel group are.
"""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    mine,
    on_group,
    random_of,
)
from tests.tensor_parallel.test_blocks import compare, config_of
from xtrain.comm import debug_checks
from xtrain.model.layer import Attention, SwiGLU
from xtrain.tensor_parallel import (
    DropoutAttention,
    ParallelAttention,
    ParallelDropout,
    ParallelSwiGLU,
    parallel_dropout,
    rank_rng,
)
from xtrain.tensor_parallel.dropout import STEP, hash_in_place, keep_mask

DROPOUT = [
    "xtrain.tensor_parallel.dropout:ParallelDropout",
    "xtrain.tensor_parallel.dropout:parallel_dropout",
    "xtrain.tensor_parallel.dropout:keep_mask",
]
RANK_RNG = "xtrain.tensor_parallel.dropout:rank_rng"
ATTENTION = "xtrain.tensor_parallel.attention_dropout:DropoutAttention"


def slices_of_one_mask(group) -> None:
    """A slice along any dim gets its slice of what the whole tensor would get."""
    size = dist.get_world_size(group)
    whole = random_of(1, 2 * size, size, 3 * size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dim in (0, -2, -1):
            x = whole.to(dtype)
            torch.manual_seed(3)
            full = parallel_dropout(x, 0.4, group=group)
            torch.manual_seed(3)
            part = mine(x, dim, group).clone().requires_grad_()
            out = parallel_dropout(part, 0.4, True, dim, group)
            assert torch.equal(out, mine(full, dim, group))
            out.backward(torch.ones_like(out))  # backward uses the same mask
            assert torch.equal(part.grad, (out != 0).to(dtype) * (1 / 0.6))
            assert 0 < (out == 0).sum() < out.numel()


@pytest.mark.verifies(*DROPOUT)
@ON_GROUPS
def test_the_mask_of_a_slice_is_the_slice_of_the_mask(world, size, members):
    world(size).run(on_group, members, slices_of_one_mask)


def masks_and_next_numbers(fused: bool) -> dict[str, torch.Tensor]:
    """What one rank drops where, and what torch's generator gives after it."""
    torch.manual_seed(11)
    ones = torch.ones(1, 4, 8, 8)
    drops = {"replicated": ParallelDropout(0.5)}
    drops["heads"] = ParallelDropout(0.5, split_dim=1)
    drops["sequence"] = ParallelDropout(0.5, split_dim=-2)
    found = {name: drop(ones) == 0 for name, drop in drops.items()}
    attend = DropoutAttention(0.5, fused=fused)  # of equal keys, each position's value
    found["attention"] = attend(ones, ones, torch.eye(8).expand(1, 4, 8, 8)) == 0
    with rank_rng(torch.get_default_device()):
        found["rank_rng"] = torch.rand(9)
    found["next"] = torch.rand(5)
    return found


@pytest.mark.verifies(*DROPOUT, RANK_RNG, ATTENTION)
@pytest.mark.parametrize("fused", [False, True])
def test_masks_are_equal_outside_the_region_and_differ_inside(world, fused):
    ranks = world(4).run(masks_and_next_numbers, fused)
    for one in range(4):
        for other in range(one):
            for name, mask in ranks[one].items():
                equal = name in ("replicated", "next")
                assert torch.equal(mask, ranks[other][name]) == equal, name
    for one, other in pairwise(["replicated", "heads", "sequence", "attention"]):
        assert not torch.equal(ranks[0][one], ranks[0][other])  # each call draws anew


def drop_rates() -> None:
    torch.manual_seed(5)
    x = torch.ones(300, 400)
    for p in (0.1, 0.5, 0.9):
        first, second = parallel_dropout(x, p), parallel_dropout(x, p)
        for out in (first, second):
            assert abs((out == 0).float().mean().item() - p) < 0.01
            assert out.max() == torch.tensor(1 / (1 - p))
        both = ((first == 0) & (second == 0)).float().mean().item()
        assert abs(both - p * p) < 0.01  # two masks are independent
        for dim in (0, 1):  # and so are neighbours
            zero = first == 0
            length = zero.shape[dim] - 1
            pairs = zero.narrow(dim, 0, length) & zero.narrow(dim, 1, length)
            assert abs(pairs.float().mean().item() - p * p) < 0.01
    assert parallel_dropout(x, 1.0).abs().sum() == 0
    state = torch.get_rng_state()
    assert parallel_dropout(x, 0.0) is x
    assert parallel_dropout(x, 0.5, training=False) is x
    assert ParallelDropout(0.5).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.verifies(*DROPOUT)
def test_as_many_elements_are_dropped_as_asked_for_and_independently(world):
    world(1).run(drop_rates)


class Residual(nn.Module):
    """Attention and SwiGLU with dropout, whole or cut: three masks of three kinds."""

    def __init__(self, attention, mlp, split_dim, group=None):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.after_attention = ParallelDropout(0.3, split_dim, group)
        self.after_mlp = ParallelDropout(0.3, split_dim, group)

    def forward(self, x):
        x = x + self.after_attention(self.attention(x))
        return x + self.after_mlp(self.mlp(x))


class Whole(Attention):
    def forward(self, x):
        return super().forward(x, torch.arange(x.shape[1]))


def whole_and_cut(group, sequence_parallel, key_heads=2):
    size = dist.get_world_size(group)
    config = config_of(4 * size, key_heads * size, 5 * size)
    attend = DropoutAttention(0.3, split_heads=False, group=group)
    whole = Residual(fill(Whole(config, attend)), fill(SwiGLU(config)), None, group)
    options = {"sequence_parallel": sequence_parallel}
    attend = DropoutAttention(0.3, group=group)
    cut = Residual(
        ParallelAttention.from_full(
            whole.attention, group, attention=attend, **options
        ),
        ParallelSwiGLU.from_full(whole.mlp, group, **options),
        1 if sequence_parallel else None,
        group,
    )
    return whole, cut


def like_the_whole_model(group) -> None:
    size = dist.get_world_size(group)
    x = random_of(5, 2, 3 * size, 6)
    rows = {f"attention.{n}_proj.weight": 0 for n in "qkv"}
    rows |= {"attention.o_proj.weight": 1, "mlp.down_proj.weight": 1}
    rows |= {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0}
    for sequence_parallel in (False, True):
        whole, cut = whole_and_cut(group, sequence_parallel)
        for training in (True, False):
            for model in (whole, cut):
                model.zero_grad()
                model.train(training).register_forward_pre_hook(seed_again)
            compare(whole, cut, [x], group, rows)


def seed_again(module, inputs) -> None:
    torch.manual_seed(21)


@pytest.mark.verifies(*DROPOUT, ATTENTION)
@ON_GROUPS
def test_a_cut_model_with_dropout_is_the_whole_one(world, size, members):
    world(size).run(on_group, members, like_the_whole_model)


def train(sequence_parallel: bool, steps: int) -> None:
    """Seeded once: the generators of all models go on alike, step by step."""
    whole, cut = whole_and_cut(None, sequence_parallel)
    size = dist.get_world_size()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, cut)]
    states = [torch.Generator().manual_seed(8).get_state()] * 2
    for step in range(steps):
        x, weights = random_of(step, 2, 2 * size, 6), random_of(90, 2, 2 * size, 6)
        for number, model in enumerate((whole, cut)):
            part = model is cut and sequence_parallel
            torch.set_rng_state(states[number])
            optimizers[number].zero_grad()
            loss = model(mine(x, 1) if part else x) * (
                mine(weights, 1) if part else weights
            )
            loss.sum().backward()
            optimizers[number].step()
            states[number] = torch.get_rng_state()
        assert torch.equal(*states)
    for name in ("q_proj", "k_proj", "v_proj"):
        full = getattr(whole.attention, name).weight
        close(getattr(cut.attention, name).weight, mine(full, 0), name)
    close(cut.mlp.down_proj.weight, mine(whole.mlp.down_proj.weight, 1), "down_proj")


@pytest.mark.verifies(*DROPOUT, ATTENTION)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_several_steps_with_dropout_are_those_of_the_whole_model(
    world, size, sequence_parallel
):
    world(size).run(train, sequence_parallel, 3)


def recompute(fused: bool) -> None:
    """Gradients with and without torch's activation checkpoint are the same bits."""
    _, cut = whole_and_cut(None, True)
    cut.attention.attention.fused = fused
    size = dist.get_world_size()
    x, seen = random_of(5, 2, 2 * size, 6), []
    for reentrant in (None, False, True):
        cut.zero_grad()
        torch.manual_seed(4)
        local = mine(x, 1).clone().requires_grad_()
        out = (
            cut(local)
            if reentrant is None
            else checkpoint(cut, local, use_reentrant=reentrant)
        )
        torch.rand(7)  # others draw before the recomputation
        out.square().sum().backward()
        grads = [parameter.grad for parameter in cut.parameters()]
        seen.append([out.detach(), local.grad, *grads, torch.get_rng_state()])
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


@pytest.mark.verifies(*DROPOUT, RANK_RNG, ATTENTION)
@pytest.mark.parametrize("fused", [False, True])
def test_recomputation_drops_the_same_elements(world, fused):
    world(2).run(recompute, fused)


def without_dropout_it_is_torchs() -> None:
    q, k, v = (random_of(n, 2, 4, 5, 6) for n in range(3))
    expected = F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True
    )
    tiny = DropoutAttention(1e-12)  # no element of so few falls below it
    for attend in (DropoutAttention(0.5).eval(), DropoutAttention(0.0), tiny):
        out = attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
        close(out, expected)
        close(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.verifies(ATTENTION)
def test_attention_that_drops_nothing_is_torchs(world):
    world(1).run(without_dropout_it_is_torchs)


def refusals() -> None:
    x = torch.ones(2, 3)
    for p in (-0.1, 1.5):
        for make in (ParallelDropout, DropoutAttention):
            with pytest.raises(ValueError, match=f"p={p} is not a probability"):
                make(p)
        with pytest.raises(ValueError, match=f"p={p} is not a probability"):
            parallel_dropout(x, p)
    with pytest.raises(ValueError, match=r"split_dim=2, but the tensor is \[2, 3\]"):
        parallel_dropout(x, 0.5, split_dim=2)
    with pytest.raises(ValueError, match="fused=True is for split heads"):
        DropoutAttention(0.5, fused=True, split_heads=False)
    torch.manual_seed(dist.get_rank())
    with debug_checks(), pytest.raises(ValueError, match="rank 1: parallel_dropout"):
        parallel_dropout(x, 0.5)  # ranks that were not seeded alike


@pytest.mark.verifies(*DROPOUT, ATTENTION)
def test_bad_input_is_refused_on_all_ranks(world):
    world(2).run(refusals)


@pytest.mark.verifies(DROPOUT[2])
def test_the_numbers_are_those_of_splitmix64():
    """Published ones, of the seed 1234567; the first is number 1 of the counter."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    counter = torch.arange(1, 6) * STEP + 1234567
    assert [n % 2**64 for n in hash_in_place(counter).tolist()] == published
    for p in (0.25, 0.5, 0.75):
        mask = keep_mask(1234567, p, [3, 2], [0, 0], [3, 2]).flatten()
        assert mask[1:].tolist() == [number >= p * 2**64 for number in published]
