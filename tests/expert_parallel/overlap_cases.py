"""Blocks with experts on several ranks, and the same ones whole on each of them.

A rank knows what all ranks have, so it computes the reference alone, in float64: one
dense layer for every rank's tokens. Gradients of experts are sums over all ranks;
everything else is of this rank's tokens.
"""

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import randn
from xtrain.expert_parallel import (
    GShardMoE,
    MoE,
    OverlappedMoEBlock,
    overlapped_prefill,
)
from xtrain.expert_parallel.overlap_backward import BackwardChunks
from xtrain.expert_parallel.overlap_chunks import ForwardChunks

HIDDEN, INNER = 6, 5


class Case(NamedTuple):
    """Blocks, and the length of each micro-batch of each rank."""

    experts: int
    top_k: int
    shared: int = 0
    score: str = "softmax"
    skew: float = 0.0  # how much all tokens like expert 0
    lengths: tuple[int, ...] = (5, 3, 4)
    blocks: int = 2
    capacity: float | None = None
    empty_rank: bool = False

    def length(self, micro_batch: int, rank: int) -> int:
        if self.empty_rank and rank == 0:
            return 0
        return self.lengths[micro_batch % len(self.lengths)] + rank


class Mixing(nn.Module):
    """In place of attention: each token sees the mean of those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.proj(self.norm(x).cumsum(1) / seen)


class Dense(nn.Module):
    """The whole block on one device."""

    def __init__(self, case: Case):
        super().__init__()
        self.attention, self.norm = Mixing(), nn.LayerNorm(HIDDEN)
        self.moe = MoE(
            HIDDEN,
            INNER,
            case.experts,
            case.top_k,
            shared_intermediate_size=case.shared,
            score=case.score,
            capacity_factor=case.capacity,
            backward="autograd",
        )
        with torch.no_grad():
            self.norm.bias.fill_(1.0)
            self.moe.router.weight[0] += case.skew

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x)
        return h + self.moe(self.norm(h))


def dense_blocks(case: Case) -> list[Dense]:
    torch.manual_seed(0)
    return [Dense(case).double() for _ in range(case.blocks)]


def overlapped(dense: list[Dense]) -> list[OverlappedMoEBlock]:
    """This rank's part of each."""
    blocks = []
    for whole in copy.deepcopy(dense):
        moe = GShardMoE.from_full(whole.moe)
        moe.experts.backward = "by_hand"
        blocks.append(OverlappedMoEBlock(whole.attention, moe, whole.norm))
    return blocks


def batch(case: Case, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, of 2 sequences."""
    generator = torch.Generator().manual_seed(100 * micro_batch + rank)
    shape = 2, case.length(micro_batch, rank), HIDDEN
    x, grad = randn(2, *shape, generator=generator)
    return x, grad


def reference(case: Case, micro_batches: int) -> tuple[list, list, dict[str, Tensor]]:
    """y and dx of this rank's micro-batches, and all gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ys, dxs, sums = [], [], {}
    for r in range(size):
        dense = nn.ModuleList(dense_blocks(case))
        for i in range(micro_batches):
            x, grad = batch(case, i, r)
            y = x.requires_grad_()
            for block in dense:
                y = block(y)
            y.backward(grad)
            if r == rank:
                ys.append(y.detach())
                dxs.append(x.grad)
        for name, parameter in dense.named_parameters():
            if ".experts." in name or r == rank:
                add = torch.zeros_like(parameter)
                add = add if parameter.grad is None else parameter.grad
                sums[name] = sums.get(name, 0) + add
    local = case.experts // size
    mine = slice(rank * local, (rank + 1) * local)
    return ys, dxs, {n: g[mine] if ".experts." in n else g for n, g in sums.items()}


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        [0.0]
        + [
            (a - b).abs().max().item() if a.numel() else float(a.shape != b.shape)
            for a, b in zip(found, wanted, strict=True)
        ]
    )


def gradients(blocks: list[OverlappedMoEBlock]) -> dict[str, Tensor]:
    named = nn.ModuleList(blocks).named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def forwards(blocks: list, x: Tensor) -> list[ForwardChunks]:
    """A micro-batch through all blocks, alone."""
    done = []
    for block in blocks:
        done.append(block.chunks(x))
        x = done[-1].run()
    return done


def pairs(blocks: list, x: Tensor, others: list, grad: Tensor) -> tuple[list, Tensor]:
    """The forward through all blocks, each under the backward of another's, from the
    last to the first."""
    done = []
    for block, other in zip(blocks, reversed(others), strict=True):
        done.append(block.run_with_backward(x, other, grad))
        x, grad = done[-1].output, other.dx
    return done, grad


def errors_of_pairs(case: Case, micro_batches: int = 3) -> list[float]:
    """Of y, dx and every gradient, after each forward ran over the backward before."""
    rank = dist.get_rank()
    blocks = overlapped(dense_blocks(case))
    batches = [batch(case, i, rank) for i in range(micro_batches)]
    xs = [x.requires_grad_() for x, _ in batches]
    done, ys, dxs = forwards(blocks, xs[0]), [], []
    for i in range(1, micro_batches):
        ys.append(done[-1].output)
        done, dx = pairs(blocks, xs[i], done, batches[i - 1][1])
        dxs.append(dx)
    ys.append(done[-1].output)
    grad = batches[-1][1]
    for forward in reversed(done):
        grad = BackwardChunks(forward, grad).run()
    dxs.append(grad)
    wanted_ys, wanted_dxs, wanted = reference(case, micro_batches)
    found = gradients(blocks)
    assert found.keys() == wanted.keys()
    sums = worst([found[n] for n in wanted], list(wanted.values()))
    return [worst(ys, wanted_ys), worst(dxs, wanted_dxs), sums]


CASES = [
    Case(4, 2),
    Case(8, 3, shared=7, score="sigmoid", lengths=(5, 1, 6)),
    Case(4, 1, skew=9.0),  # all to expert 0: the others get nothing
    Case(8, 4, shared=3, skew=2.0, empty_rank=True),
    Case(4, 2, capacity=0.8, lengths=(6,), blocks=1),
    Case(4, 4, blocks=3, lengths=(2, 5)),
]


def all_errors(cases: list[Case]) -> list[list[float]]:
    return [errors_of_pairs(case) for case in cases]


def difference_from_alone(case: Case) -> float:
    """Of a pair's results from those of the same chunks one after the other."""
    rank = dist.get_rank()

    def run(together: bool) -> list[Tensor]:
        blocks = overlapped(dense_blocks(case))[:1]
        (x0, grad), (x1, _) = batch(case, 0, rank), batch(case, 1, rank)
        other = forwards(blocks, x0.requires_grad_())
        if together:
            (forward,), dx = pairs(blocks, x1.requires_grad_(), other, grad)
        else:
            (forward,) = forwards(blocks, x1.requires_grad_())
            dx = BackwardChunks(other[0], grad).run()
        return [forward.output, dx, *gradients(blocks).values()]

    results = run(True), run(False)
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return 0.0 if same else worst(*results)


def errors_in_one_graph(case: Case) -> float:
    """Of a forward in chunks that leaves autograd's backward, from the module's."""

    def run(chunked: bool) -> list[Tensor]:
        blocks = overlapped(dense_blocks(case))
        x, grad = batch(case, 0, dist.get_rank())
        y = x.requires_grad_()
        for block in blocks:
            chunks = ForwardChunks(block, y, in_pieces=False)
            y = chunks.run() if chunked else block(y)
        y.backward(grad)
        return [y.detach(), x.grad, *gradients(blocks).values()]

    return worst(run(True), run(False))


def names_of_a_pair() -> list[str]:
    """What a block with a shared expert did, in order."""
    case = Case(4, 2, shared=3)
    (block,) = overlapped(dense_blocks(case)[:1])
    (x0, grad), (x1, _) = (batch(case, i, dist.get_rank()) for i in (0, 1))
    other = block.chunks(x0.requires_grad_())
    other.run()
    block.events = []
    block.run_with_backward(x1.requires_grad_(), other, grad)
    return [event.name for event in block.events]


def prefill_errors(case: Case) -> list[float]:
    """Of two micro-batches through one block, and through all."""
    rank, errors = dist.get_rank(), []
    dense = dense_blocks(case)
    blocks = overlapped(dense)
    x0, x1 = (batch(case, i, rank)[0] for i in (0, 1))
    for several in (blocks[0], blocks):
        found = overlapped_prefill(several, x0, x1)
        wanted = []
        for x in (x0, x1):
            for whole in dense[: 1 if several is blocks[0] else None]:
                x = whole(x)
            wanted.append(x.detach())
        assert not any(y.requires_grad for y in found)
        errors.append(worst(list(found), wanted))
    return errors


def names_of_prefill() -> list[str]:
    """What two blocks did, in order."""
    case = Case(4, 2, shared=3)
    blocks, events = overlapped(dense_blocks(case)), []
    for block in blocks:
        block.events = events
    rank = dist.get_rank()
    overlapped_prefill(blocks, batch(case, 0, rank)[0], batch(case, 1, rank)[0])
    return [event.name for event in events]


def auxiliary_errors() -> list[float]:
    """Of gradients with a loss of the router's, which is run backward by itself."""

    def run(chunked: bool) -> list[Tensor]:
        (block,) = overlapped(dense_blocks(Case(4, 2, shared=3))[:1])
        (x0, grad), (x1, _) = (batch(Case(4, 2), i, dist.get_rank()) for i in (0, 1))
        other = block.chunks(x0.requires_grad_())
        y = other.run() if chunked else block(x0)
        stats = block.moe.router.stats
        loss = 0.3 * stats.load_balancing_loss + 0.2 * stats.z_loss
        if chunked:
            loss.backward()
            block.run_with_backward(x1.requires_grad_(), other, grad)
        else:
            torch.autograd.backward([y, loss], [grad, None])
        dx = other.dx if chunked else x0.grad
        return [dx, *gradients([block]).values()]

    return [worst(run(True), run(False))]


def frozen_experts() -> float:
    """The same with nothing to train before the experts but x, and no dx."""

    def run(chunked: bool) -> list[Tensor]:
        (block,) = overlapped(dense_blocks(Case(4, 2))[:1])
        for part in (block.attention, block.norm, block.moe.router):
            part.requires_grad_(False)
        x, grad = batch(Case(4, 2), 0, dist.get_rank())
        forward = block.chunks(x)
        if chunked:
            forward.run()
            assert BackwardChunks(forward, grad).run() is None
        else:
            block(x).backward(grad)
        return list(gradients([block]).values())

    return worst(run(True), run(False))


def refused(what: str) -> None:
    case, rank = Case(4, 2), dist.get_rank()
    (block,) = overlapped(dense_blocks(case)[:1])
    x0, grad = batch(case, 0, rank)
    if what == "moe":
        OverlappedMoEBlock(block.attention, dense_blocks(case)[0].moe)
    elif what == "once a rank":
        moe = GShardMoE.from_full(dense_blocks(case)[0].moe, once_a_rank=True)
        OverlappedMoEBlock(block.attention, moe)
    elif what == "hidden":
        wrong = x0[..., : HIDDEN - 1] if rank == 0 else x0
        overlapped_prefill(block, wrong, x0)
    elif what == "twice":
        forward = block.chunks(x0.requires_grad_())
        forward.run()
        BackwardChunks(forward, grad).run()
        BackwardChunks(forward, grad)
    else:
        BackwardChunks(block.chunks(x0), grad)
