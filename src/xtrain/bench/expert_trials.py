"""Mixtures of experts as trials: forward and backward, the same for all contestants.

    one process   rank 0 has all tokens and all experts, the others wait
    on ranks      every rank has its tokens and its experts

A trial runs its step once when it is made. What it leaves must be what one process
computes in float64 (`moe_in_float64`): the output and the gradients of the tokens, the
router and the three matrices of every expert.

`size` of a case is that of all tokens in bytes.

Shapes: T tokens, H hidden, F inner size, E experts, k experts of a token.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.bench.attention_trials import nothing
from xtrain.bench.race import Case, Trial
from xtrain.bench.slow_network import slow_network
from xtrain.expert_parallel import GShardMoE, MoE, OverlappedMoEBlock
from xtrain.expert_parallel.overlap_backward import BackwardChunks
from xtrain.expert_parallel.overlap_chunks import ForwardChunks

NUM_EXPERTS, TOP_K = 64, 2
MOE_TOLERANCE = 1e-4  # of fp32 against float64

Layer = Callable[[MoE], tuple[Callable[[Tensor], Tensor], Sequence[Tensor], "Gather"]]
"""Makes, from a layer of ours, one that computes the same: what to call, the tensors
that need gradients, and how these gradients become those of our parameters."""
Gather = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Of a layer: H and F."""

    hidden: int
    inner: int

    def bytes_of(self, tokens: int) -> int:
        """Bytes of so many tokens, in fp32."""
        return 4 * tokens * self.hidden

    def layer(self) -> MoE:
        """The same weights on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MoE(self.hidden, self.inner, NUM_EXPERTS, TOP_K)

    def tokens(self, case: Case) -> tuple[Tensor, Tensor]:
        """All tokens, and the gradient of what becomes of them: [T, H] each."""
        rows = max(case.size // self.bytes_of(1), case.ranks)
        generator = torch.Generator().manual_seed(1)
        x, grad = torch.randn(2, rows, self.hidden, generator=generator)
        return x, grad


def gradients(
    layer: Callable[[Tensor], Tensor], weights: Sequence[Tensor], x: Tensor, dy: Tensor
) -> list[Tensor]:
    """Forward and backward: y, dx, and the gradients of the weights."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], dy)]


def moe_in_float64(sizes: Sizes, case: Case) -> list[Tensor]:
    """Output and gradients of one process, each expert a few of torch's functions."""
    x, dy = (t.double() for t in sizes.tokens(case))
    layer, weights, gather = masked_loop(sizes.layer().double())
    y, dx, *rest = gradients(layer, weights, x.requires_grad_(), dy)
    return [y, dx, *gather(rest)]


def layer_trial(make: Layer, sizes: Sizes, case: Case) -> Trial:
    """The whole layer on rank 0; every rank has run it once, to be checked."""
    layer, weights, gather = make(sizes.layer())
    x, dy = sizes.tokens(case)
    step = partial(gradients, layer, weights, x.requires_grad_(), dy)
    y, dx, *rest = step()
    return Trial(step if dist.get_rank() == 0 else nothing, [y, dx, *gather(rest)])


# ------------------------------------------------------------------ one process


def ours(moe: MoE) -> tuple[Callable[[Tensor], Tensor], list[Tensor], Gather]:
    """The layer as it is: the way to compute is chosen by size."""
    return moe, list(moe.parameters()), list


def masked_loop(moe: MoE) -> tuple[Callable[[Tensor], Tensor], list[Tensor], Gather]:
    """Expert by expert: which tokens chose it, through it, added to their rows.

    Each expert has parameters of its own, so that the gradient of one is no larger
    than it.
    """
    matrices = [
        [w.detach().clone().requires_grad_() for w in weight]
        for weight in moe.experts.parameters()
    ]

    def layer(x_TH: Tensor) -> Tensor:
        routing = moe.router(x_TH)
        y_TH = torch.zeros_like(x_TH)
        for expert, (gate, up, down) in enumerate(zip(*matrices, strict=True)):
            token, choice = torch.where(routing.experts_Tk == expert)
            x = x_TH[token]
            out = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            out = out * routing.gates_Tk[token, choice, None].to(out.dtype)
            y_TH.index_add_(0, token, out)
        return y_TH

    def gather(found: Sequence[Tensor]) -> list[Tensor]:
        each = [found[1 + i * NUM_EXPERTS :][:NUM_EXPERTS] for i in range(3)]
        return [found[0], *(torch.stack(list(part)) for part in each)]

    return layer, [moe.router.weight, *itertools.chain(*matrices)], gather


def transformers_block(
    implementation: str, moe: MoE
) -> tuple[Callable[[Tensor], Tensor], list[Tensor], Gather]:
    """Mixtral's block of `transformers` with the same weights.

    Args:
        implementation: of its experts: "eager", its loop, or "grouped_mm".
    """
    from transformers.models.mixtral import modeling_mixtral as theirs

    experts = moe.experts
    config = theirs.MixtralConfig(
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = implementation
    block: Any = theirs.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(moe.router.weight)
        both = torch.cat([experts.gate_proj, experts.up_proj], 1)
        block.experts.gate_up_proj.copy_(both)
        block.experts.down_proj.copy_(experts.down_proj)

    def gather(found: Sequence[Tensor]) -> list[Tensor]:
        router, both, down = found
        return [router, *both.chunk(2, 1), down]

    weights = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    return lambda x_TH: block(x_TH[None])[0], list(weights), gather


# ------------------------------------------------------------------ over all ranks


def sharded_trial(sizes: Sizes, case: Case) -> Trial:
    """Tokens and experts over all ranks; the results are joined to be checked."""
    rank = dist.get_rank()
    x, dy = (t.tensor_split(case.ranks)[rank] for t in sizes.tokens(case))
    x = x.clone().requires_grad_()
    layer = GShardMoE.from_full(sizes.layer())
    step = partial(gradients, layer, list(layer.parameters()), x, dy.clone())
    y, dx, router, *experts = step()
    dist.all_reduce(router)
    joined = [joined_rows(t) for t in (y, dx)]
    return Trial(step, [*joined, router, *map(joined_rows, experts)])


def joined_rows(mine: Tensor) -> Tensor:
    """The rows of all ranks, which may have different numbers of them."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return torch.cat(parts)


class HalfBlock(nn.Module):
    """Attention without a mask, its norm and its residual: x [T, H] -> h."""

    def __init__(self, hidden: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        tokens, hidden = x_TH.shape
        qkv = self.qkv(F.layer_norm(x_TH, (hidden,))).view(1, tokens, self.heads, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x_TH + self.out(seen.reshape(tokens, hidden))


def pair_trial(
    together: bool, experts: int, latency: float, sizes: Sizes, case: Case
) -> Trial:
    """The forward of one micro-batch and the backward of another through one block.

    Args:
        together: overlapped; else one after the other, with the same chunks.
        latency: seconds that each all-to-all takes more than gloo's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = HalfBlock(sizes.hidden)
        moe = MoE(sizes.hidden, sizes.inner, experts, TOP_K)
    sharded = GShardMoE.from_full(moe, slow_network(latency))
    block = OverlappedMoEBlock(attention, sharded, nn.LayerNorm(sizes.hidden))
    rank = dist.get_rank()
    x, dy = (t.tensor_split(case.ranks)[rank].clone() for t in sizes.tokens(case))
    first = ForwardChunks(block, x.flip(0).requires_grad_())
    first.run()
    state = [first]

    def pair() -> ForwardChunks:
        other = state[0]
        block.zero_grad()
        if together:
            state[0] = block.run_with_backward(x.clone().requires_grad_(), other, dy)
        else:
            state[0] = ForwardChunks(block, x.clone().requires_grad_())
            state[0].run()
            BackwardChunks(other, dy).run()
        return other

    other = pair()
    assert other.dx is not None
    found = [state[0].output, other.dx, *(p.grad for p in block.parameters())]
    return Trial(pair, [t.detach().clone() for t in found if t is not None])
