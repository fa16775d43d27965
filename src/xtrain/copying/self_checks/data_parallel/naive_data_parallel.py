"""Five steps equal five steps of one process on the batches of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    in_both,
    near,
    randn,
    same,
    sends,
)
from xtrain.whiteboard.data_parallel.naive_data_parallel import (
    NaiveDataParallel,
)


def layers(rank: int) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    model.register_buffer("number", torch.tensor([float(rank)]))
    return model


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def batch(step: int, micro: int, of: int) -> Tensor:
        return randn(3, 8, seed=100 * step + 10 * micro + of, dtype=dtype)

    for micro_batches in (1, 2):
        model, exact = in_both(layers(rank), dtype)
        with torch.no_grad():
            for p in model.parameters():
                p += rank  # and rank 0's go to all
        parallel = NaiveDataParallel(model, group)
        trained = [
            [p for p in m.parameters() if p.requires_grad] for m in (model, exact)
        ]
        optimizers = [torch.optim.AdamW(own, lr=0.02) for own in trained]
        for step in range(5 if dtype == torch.float64 else 1):  # roundings add up
            for optimizer in optimizers:
                optimizer.zero_grad()
            for micro in range(micro_batches):
                for other in range(size):
                    x = batch(step, micro, other).double()
                    (exact(x).square().sum() / size).backward()
            with Sent(group) as sent:
                for micro in range(micro_batches):
                    parallel(batch(step, micro, rank)).square().sum().backward()
                parallel.reduce_gradients()
            for p, q in zip(*trained, strict=True):
                assert p.grad is not None and q.grad is not None
                what = f"the gradient of {tuple(p.shape)} in step {step}"
                near(what, p.grad, q.grad, dtype, group)
            for optimizer in optimizers:
                optimizer.step()
        if dtype == torch.float64:
            for (name, p), q in zip(
                model.named_parameters(), exact.parameters(), strict=True
            ):
                near(f"{name} after 5 steps", p.detach(), q.detach(), dtype, group)
                first = p.detach().clone()
                dist.broadcast(first, group_src=0, group=group)
                same("with the same bits on every rank", p.detach(), first, 0, group)
        same("rank 0's buffer", model.number, 0 * model.number, 0, group)
        nbytes = sum(p.nbytes for p in trained[0])
        formula = f"2(N-1)/N of {nbytes:,} bytes"
        sends(sent, formula, 2 * (size - 1) / size * nbytes, group)
