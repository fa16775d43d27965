"""Of whole training steps on a mesh: three of them are those of one process."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtrain.copying.self_checks.harness import GROUP, Sent, gradient, randn, same, sends

AXES = ("pipeline", "data", "tensor")
SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)],
    8: [(2, 2, 2)],
}
"""Sizes of the axes, by how many ranks there are."""
MLPS, HIDDEN, INNER, ROWS, MICRO_BATCHES = 2, 6, 12, 2, 3  # MLPs of a stage


def loss_of(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all rows with a target, and how many these are."""
    return F.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


def whole_mlps(stages: int) -> list[tuple[Tensor, Tensor]]:
    """Of all stages, the same on every rank."""
    pairs = []
    for seed in range(100, 100 + 2 * MLPS * stages, 2):
        up = randn(INNER, HIDDEN, seed=seed) / 3
        down = randn(HIDDEN, INNER, seed=seed + 1) / 3
        pairs.append((up.requires_grad_(), down.requires_grad_()))
    return pairs


def groups_along(shape: tuple[int, ...], rank: int) -> list[Any]:
    """This rank's group of each axis; the last axis varies fastest."""
    ranks, found = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape), []
    for dim in range(len(shape)):
        for line in ranks.movedim(dim, -1).reshape(-1, shape[dim]).tolist():
            group = dist.new_group(line)
            if rank in line:
                found.append(group)
    return found


def sent_by_axis() -> Any:
    """Counts a collective as a ring of the group that it is called in."""

    class SentByAxis(Sent):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
            if not func.name().startswith("c10d::") or not boxed:
                return super().__torch_dispatch__(func, types, args, kwargs)
            token = GROUP.set(dist.ProcessGroup.unbox(boxed[0]))
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                GROUP.reset(token)

    return SentByAxis()


def check_mesh_training_step(form: Any, rank: int, size: int) -> None:
    """Three steps on every mesh of two axes, or of all, equal those of one process."""
    for shape in SHAPES[size]:
        check_shape(form, rank, shape)


def check_shape(form: Any, rank: int, shape: tuple[int, int, int]) -> None:
    words = " x ".join(f"{n} {axis}" for n, axis in zip(shape, AXES, strict=True))
    groups = groups_along(shape, rank)
    at = [dist.get_rank(group) for group in groups]
    whole = whole_mlps(shape[0])
    first = at[0] * MLPS
    mine, names = [], []
    for n, (up, down) in enumerate(whole[first : first + MLPS], start=first):
        cuts = up.chunk(shape[2], 0)[at[2]], down.chunk(shape[2], 1)[at[2]]
        mine.append(tuple(cut.detach().clone().requires_grad_() for cut in cuts))
        names += [f"d up of MLP {n}", f"d down of MLP {n}"]
    optimizers = [
        torch.optim.SGD([weight for pair in pairs for weight in pair], lr=0.5)
        for pairs in (whole, mine)
    ]
    rows = shape[1] * MICRO_BATCHES * ROWS
    targets = torch.arange(rows) % HIDDEN
    targets[1:6] = -100  # so micro-batches and data ranks count unequally
    for step in range(3):
        inputs = randn(rows, HIDDEN, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = inputs
        for up, down in whole:
            y = y + F.linear(F.gelu(F.linear(y, up)), down)
        total, count = loss_of(y, targets)
        expected = total / count
        expected.backward()
        own = [t.chunk(shape[1])[at[1]].clone() for t in (inputs, targets)]
        named = dict(zip([f"{axis}_group" for axis in AXES], groups, strict=True))
        with sent_by_axis() as sent:
            loss = form(mine, loss_of, *own, MICRO_BATCHES, **named)
        what = f"the loss of step {step} on {words}"
        same(what, loss.to(expected.dtype), expected.detach())
        wholes = [w for pair in whole[first : first + MLPS] for w in pair]
        slices = [w for pair in mine for w in pair]
        for n, name in enumerate(names):
            right = gradient(wholes[n]).chunk(shape[2], n % 2)[at[2]]
            same(f"{name} in step {step} on {words}", gradient(slices[n]), right)
        for optimizer in optimizers:
            optimizer.step()
    activation = own[0].nbytes / MICRO_BATCHES
    neighbours = (at[0] > 0) + (at[0] < shape[0] - 1)
    sums = 4 * MLPS - 2 * (at[0] == 0)  # the batch itself needs no gradient
    p, d, t = ((n - 1) / n for n in shape)
    sends(
        sent,
        "m times y, dy, 4(T-1)/T y an MLP, 2 the first; 2(D-1)/D of the weights",
        MICRO_BATCHES * activation * (neighbours + t * sums)
        + 2 * d * sum(weight.nbytes for weight in slices)
        + (2 * d + p) * 16,  # the sum and the count, in float64
    )
