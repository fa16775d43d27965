"""The whiteboard forms of lc8 equal one process: every mesh, any micro-batches, groups
of some of the ranks, float64 and fp32.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.tensor_parallel.dense import random_of
from xtrain.comm import init_mesh
from xtrain.whiteboard.train.mesh_training_step import mesh_training_step

STEP = "xtrain.whiteboard.train.mesh_training_step:mesh_training_step"
AXES = ("pipeline", "data", "tensor")
LAYERS, HIDDEN, INNER, WORDS = 4, 5, 12, 5
Pairs = list[tuple[Tensor, Tensor]]


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


def whole_pairs(dtype) -> Pairs:
    """Four MLPs, of which a stage has one, two or all."""
    shapes = [(INNER, HIDDEN), (HIDDEN, INNER)] * LAYERS
    drawn = [random_of(n, *shape).to(dtype) / 3 for n, shape in enumerate(shapes)]
    leaves = [weight.requires_grad_() for weight in drawn]
    return list(zip(leaves[::2], leaves[1::2], strict=True))


def one_process(pairs: Pairs, inputs: Tensor, targets: Tensor) -> Tensor:
    y = inputs
    for up, down in pairs:
        y = y + F.linear(F.gelu(F.linear(y, up)), down)
    total, count = loss_fn(y, targets)
    (total / count).backward()
    return (total / count).detach()


def batch_of(step: int, rows: int, dtype) -> tuple[Tensor, Tensor]:
    """As many targets count as chance has it; the first rows have none."""
    targets = (random_of(step + 50, rows).abs() * 100).long() % WORDS
    targets[random_of(step + 60, rows) > 0.3] = -100
    targets[: rows // 4], targets[-1] = -100, 2
    return random_of(step + 70, rows, HIDDEN).to(dtype), targets


def three_steps(shape, micro_batches: int, groups, dtype=torch.float64) -> None:
    """`groups`: of this rank, by axis."""
    at = {axis: dist.get_rank(group) for axis, group in groups.items()}
    stages, copies, slices = shape
    whole, stage = whole_pairs(dtype), LAYERS // stages
    own = whole[at["pipeline"] * stage :][:stage]
    cut = [
        (up.chunk(slices, 0)[at["tensor"]], down.chunk(slices, 1)[at["tensor"]])
        for up, down in own
    ]
    mine = [tuple(w.detach().clone().requires_grad_() for w in pair) for pair in cut]
    optimizers = [
        torch.optim.SGD([w for pair in pairs for w in pair], lr=0.5, momentum=0.9)
        for pairs in (whole, mine)
    ]
    allowed = 1e-12 if dtype == torch.float64 else 1e-4
    for step in range(3):
        batch = batch_of(step, copies * micro_batches * 2, dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = one_process(whole, *batch)
        rows = [t.chunk(copies)[at["data"]].clone() for t in batch]
        named = {f"{axis}_group": group for axis, group in groups.items()}
        loss = mesh_training_step(mine, loss_fn, *rows, micro_batches, **named)
        assert abs(loss.item() - expected.item()) <= allowed, (shape, step)
        for pair, wholes in zip(mine, own, strict=True):
            for dim, (weight, full) in enumerate(zip(pair, wholes, strict=True)):
                right = full.grad.chunk(slices, dim)[at["tensor"]]
                torch.testing.assert_close(weight.grad, right, rtol=0, atol=allowed)
        for optimizer in optimizers:
            optimizer.step()
    for pair, wholes in zip(mine, own, strict=True):
        for dim, (weight, full) in enumerate(zip(pair, wholes, strict=True)):
            right = full.chunk(slices, dim)[at["tensor"]]
            torch.testing.assert_close(weight, right, rtol=0, atol=10 * allowed)


def on_every_mesh(size: int) -> None:
    for shape in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4)):
        if shape[0] * shape[1] * shape[2] == size:
            mesh = init_mesh(shape, AXES)
            groups = {axis: mesh[axis].get_group() for axis in AXES}
            for micro_batches in (1, 3):
                three_steps(shape, micro_batches, groups)
            three_steps(shape, 2, groups, torch.float32)


@pytest.mark.verifies(STEP)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_step_on_every_mesh_is_that_of_one_process(world, size):
    world(size).run(on_every_mesh, size)


def on_some_ranks() -> None:
    """Ranks 3, 1 as two tensor ranks; ranks 0 and 2 take no part."""
    alone = {rank: dist.new_group([rank]) for rank in range(4)}
    pair = dist.new_group([3, 1])
    rank = dist.get_rank()
    if rank in (1, 3):
        groups = {"pipeline": alone[rank], "data": alone[rank], "tensor": pair}
        three_steps((1, 1, 2), 3, groups)


@pytest.mark.verifies(STEP)
def test_a_step_on_some_of_the_ranks(world):
    world(4).run(on_some_ranks)
