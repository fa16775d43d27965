"""Of ZeRO: five steps on shards are those of one process on all batches."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.copying.self_checks.harness import GROUP, Sent, randn, same, say, sends
from xtrain.copying.self_checks.training import five_steps, flat, model_of


def train(form: Any, rank: int, size: int) -> tuple[Any, Sent, Sent]:
    """The sharded optimizer, and what its last backward and its last step sent."""
    alone, model = (model_of(seed, 8, 32, 5) for seed in (0, rank))
    whole = torch.optim.AdamW(alone.parameters(), lr=0.02)
    zero = form(model.parameters(), torch.optim.AdamW, lr=0.02)  # rank 0's weights
    back, stepped = five_steps(alone, model, [whole, zero], rank, size)
    same("the weights after 5 steps are one process's", flat(model), flat(alone))
    held, full = (
        sum(t.nbytes for s in o.state.values() for t in s.values() if t.dim())
        for o in (zero.optimizer, whole)
    )
    say(f"optimizer state on each rank: {held:,} bytes; of one process: {full:,}")
    return zero, back, stepped


def check_adamw(form: Any, rank: int, size: int) -> None:
    """A hundred steps equal torch's."""
    start = randn(50, seed=0)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        form([mine], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([other], lr=0.02, weight_decay=0.1),
    ]
    with Sent() as sent:
        for step in range(100):
            mine.grad = other.grad = randn(50, seed=step)
            for optimizer in optimizers:
                optimizer.step()
    same("the weights after 100 steps are torch's", mine.detach(), other.detach())
    sends(sent, "nothing", 0)


def check_clip_grad_norm(form: Any, rank: int, size: int) -> None:
    """The norm and the clipped shards are torch's of all gradients."""
    whole = nn.Parameter(torch.zeros(960))
    whole.grad = randn(960, seed=0)
    shard = whole.grad.chunk(size)[rank].clone()
    with Sent() as sent:
        norm = form(list(shard.split(97)), 1.0)
    expected = nn.utils.clip_grad_norm_([whole], 1.0)
    same("the norm of 960 gradients", norm.to(expected.dtype), expected)
    same("its part of them, clipped", shard, whole.grad.chunk(size)[rank])
    form([shard], 1e3)
    same("what is below max_norm stays", shard, whole.grad.chunk(size)[rank])
    sends(sent, "2(N-1)/N of one float64", 2 * (size - 1) / size * 8)


class Blocks(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def check_fully_sharded(form: Any, rank: int, size: int) -> None:
    """Five AdamW steps on shards equal five of one process on all batches."""
    alone, model = Blocks(0), form(Blocks(rank))  # rank 0's weights go to all
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (alone, model)]
    sent, _ = five_steps(alone, model, optimizers, rank, size)
    units = [m for m in model.modules() if isinstance(m, type(model))]
    for unit, bare in zip(units, [alone.first, *alone.layers], strict=True):
        parts = [torch.empty_like(unit.shard) for _ in range(size)]
        dist.all_gather(parts, unit.shard.detach(), GROUP.get())
        mine = torch.cat(parts)[: sum(s.numel() for s in unit.shapes.values())]
        same("a block's weights after 5 steps", mine.detach(), flat(bare))
    held, full = (sum(p.nbytes for p in m.parameters()) for m in (model, alone))
    say(f"weights on each rank: {held:,} bytes; of one process: {full:,}")
    nbytes = size * held
    sends(sent, "3(N-1)/N of the parameters a step", 3 * (size - 1) / size * nbytes)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def check_fully_sharded_prefetch(form: Any, rank: int, size: int) -> None:
    """Five AdamW steps on shards equal five of one process on all batches."""
    alone, model = chain(), form(chain())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (alone, model)]
    sent, _ = five_steps(alone, model, optimizers, rank, size)
    for shard, block in zip(model.shards, alone, strict=True):
        whole = flat(block).chunk(size)[rank]
        same("a block's shard after 5 steps", shard.detach(), whole)
    held = sum(p.nbytes for p in model.parameters())
    say(f"weights on each rank: {held:,} bytes; of one process: {size * held:,}")
    sends(sent, "3(N-1)/N of the parameters a step", 3 * (size - 1) * held)


def check_mixed_precision(form: Any, rank: int, size: int) -> None:
    """Small steps add up in masters; an overflow on one rank stops all ranks."""
    weight = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = form([weight], torch.optim.SGD, lr=0.001)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    master = optimizer.masters[0]
    same(
        "1 less 100 steps of 0.001, in the master",
        master,
        torch.full((4,), 0.9, dtype=torch.float32),
    )
    same("the bf16 weight is the master's cast", weight.detach(), master.bfloat16(), 0)

    weight = nn.Parameter(torch.ones(4).half())
    optimizer = form([weight], torch.optim.SGD, 1024.0, lr=0.1)
    weight.grad = torch.full_like(weight, float("inf") if rank == size - 1 else 1.0)
    with Sent() as sent:
        assert optimizer.step() is False
    same(
        "the weight after the last rank's overflow",
        weight.detach(),
        torch.ones(4).half(),
        0,
    )
    same("the scale, halved", torch.tensor(optimizer.scale), torch.tensor(512.0), 0)
    optimizer.zero_grad()
    optimizer.backward((2 * weight).sum())
    assert optimizer.step() is True
    stepped = torch.full((4,), 0.8, dtype=torch.float32).half()
    same("the weight after a scaled step of 0.1 * 2", weight.detach(), stepped, 0)
    nbytes = torch.get_default_dtype().itemsize
    sends(sent, "one number a step", 2 * (size - 1) / size * nbytes)


def check_muon(form: Any, rank: int, size: int) -> None:
    """Five steps of matrices that were dealt out equal torch's of one process."""
    shapes = [(12, 5), (4, 16), (8, 8), (1, 6), (24, 16)]
    mine, theirs = (
        [nn.Parameter(randn(*s, seed=i)) for i, s in enumerate(shapes)]
        for _ in range(2)
    )
    ours = form(mine, lr=0.02, weight_decay=0.3)
    alone = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3)
    for step in range(5):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            # averaged already
            one.grad = randn(*one.shape, seed=100 * step + number)
            other.grad = one.grad.clone()
        alone.step()
        with Sent() as sent:
            ours.step()
    for one, other in zip(mine, theirs, strict=True):
        what = f"a matrix {list(one.shape)} after 5 steps"
        same(what, one.detach(), other.detach(), 1e-9)
    held, full = (
        sum(t.nbytes for s in o.state.values() for t in s.values())
        for o in (ours, alone)
    )
    say(f"momentum on this rank: {held:,} bytes; of one process: {full:,}")
    nbytes = (size - 1) / size * 2 * sum(p.numel() for p in mine)
    sends(sent, "(N-1)/N of the matrices a step", nbytes)


def check_zero_1(form: Any, rank: int, size: int) -> None:
    """Five AdamW steps on shards equal five of one process on all batches."""
    zero, _, stepped = train(form, rank, size)
    nbytes = 2 * (size - 1) / size * zero.flat.nbytes  # padded
    sends(stepped, "2(N-1)/N of the parameters a step", nbytes)


def check_zero_2(form: Any, rank: int, size: int) -> None:
    """Five AdamW steps on shards equal five of one process on all batches."""
    zero, back, stepped = train(form, rank, size)
    whole = sum(flat.nbytes for flat, _ in zero.shards.values())  # padded
    nbytes = (size - 1) / size * whole
    sends(back, "(N-1)/N of the parameters in each backward", nbytes)
    sends(stepped, "(N-1)/N in each step", nbytes)
