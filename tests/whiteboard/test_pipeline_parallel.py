"""The whiteboard forms of lc5 that run a schedule: a step equals one process's step.

Loss, every gradient and the weights after three optimizer steps are compared with the
whole model in float64, on groups of 1 to 4 ranks and on parts of the ranks, for fewer,
as many and more micro-batches than ranks, of which one has no token that counts.
"""

import copy
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline_parallel.pipelines import Held, Watched
from tests.tensor_parallel.dense import close, fill, random_of, sub_group
from xtrain.cluster.per_rank import replaced
from xtrain.whiteboard.pipeline_parallel import gpipe_step as gpipe_file
from xtrain.whiteboard.pipeline_parallel import one_f_one_b_step as one_f_one_b_file
from xtrain.whiteboard.pipeline_parallel.gpipe_step import gpipe_step
from xtrain.whiteboard.pipeline_parallel.one_f_one_b_step import one_f_one_b_step

GPIPE = "xtrain.whiteboard.pipeline_parallel.gpipe_step:gpipe_step"
ONE_F_ONE_B = "xtrain.whiteboard.pipeline_parallel.one_f_one_b_step:one_f_one_b_step"
FILES = {"gpipe_step": gpipe_file, "one_f_one_b_step": one_f_one_b_file}
STEPS = {"gpipe_step": gpipe_step, "one_f_one_b_step": one_f_one_b_step}

GROUPS = [None, [0], [0, 1], [0, 1, 2], [1, 3], [3, 1, 2]]
WORDS, HIDDEN, ROWS, LENGTH = 11, 6, 2, 3


def whole_model() -> nn.Sequential:
    """Five blocks, so that a rank of a smaller group has two or more."""
    blocks = [nn.Embedding(WORDS, HIDDEN)]
    blocks += [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3)]
    return fill(nn.Sequential(*blocks, nn.Linear(HIDDEN, WORDS)))


def stage_of(model: nn.Sequential, rank: int, size: int) -> nn.Sequential:
    """The blocks of one rank; the first ranks have one more."""
    parts = torch.arange(len(model)).tensor_split(size)
    return copy.deepcopy(model[parts[rank][0] : parts[rank][-1] + 1])


def loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def batch_of(seed: int, micro_batches: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; as many labels count as chance has it, and first none."""
    shape = (ROWS * micro_batches, LENGTH)
    tokens = (random_of(seed, *shape).abs() * 100).long() % WORDS
    labels = (random_of(seed + 1, *shape).abs() * 100).long() % WORDS
    labels[random_of(seed + 2, *shape) > 0.3] = -100
    labels[: ROWS * (micro_batches > 1)] = -100
    labels[-1, -1] = 4
    return tokens, labels


def three_steps(step, micro_batches: int, group, dtype=torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = whole_model()
    stage = stage_of(model, rank, size).to(dtype)
    names = dict(zip(stage.parameters(), names_of(model, rank, size), strict=True))
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, stage)
    ]
    activation = torch.empty(ROWS, LENGTH, HIDDEN, dtype=dtype)
    allowed = 1e-12 if dtype == torch.float64 else 1e-4
    for number in range(3):
        tokens, labels = batch_of(10 * number, micro_batches)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = loss_fn(model(tokens), labels)
        (total / count).backward()
        loss = step(
            stage,
            loss_fn,
            tokens if rank == 0 else None,
            labels if rank == size - 1 else None,
            micro_batches,
            activation,
            group,
        )
        assert abs(loss.item() - (total / count).item()) <= allowed, number
        for parameter, name in names.items():
            expected = model.get_parameter(name).grad
            error = (parameter.grad - expected).abs().max().item()
            assert error <= allowed, f"step {number}, {name}: {error}"
        for optimizer in optimizers:
            optimizer.step()
    if dtype == torch.float64:
        for parameter, name in names.items():
            close(parameter, model.get_parameter(name), name)


def names_of(model: nn.Sequential, rank: int, size: int) -> list[str]:
    mine = torch.arange(len(model)).tensor_split(size)[rank].tolist()
    return [n for n, _ in model.named_parameters() if int(n.split(".")[0]) in mine]


def on_every_group(step) -> None:
    for members in GROUPS:
        group = sub_group(members) if members else None
        if members is None or group is not None:
            size = dist.get_world_size(group)
            for micro_batches in {1, size - 1, size, size + 1, 2 * size + 1} - {0}:
                three_steps(step, micro_batches, group)
            three_steps(step, size + 1, group, torch.float32)


@pytest.mark.verifies(GPIPE)
def test_gpipe_is_one_process_for_any_number_of_micro_batches(world):
    world(4).run(on_every_group, gpipe_step)


@pytest.mark.verifies(ONE_F_ONE_B)
def test_1f1b_is_one_process_for_any_number_of_micro_batches(world):
    world(4).run(on_every_group, one_f_one_b_step)


def names_held() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return names_of(whole_model(), rank, size)


def test_the_stages_of_these_tests_are_the_model_cut(world):
    held = [name for names in world(4).run(names_held) for name in names]
    assert held == [name for name, _ in whole_model().named_parameters()]


# --- what waits in memory -------------------------------------------------------------


def kept_at_most(step, micro_batches: int) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    held = Held()
    stage = Watched(stage_of(whole_model(), rank, size), held, 0)
    activation = torch.empty(ROWS, LENGTH, HIDDEN, dtype=torch.float64)
    step(stage, loss_fn, *batch_of(1, micro_batches), micro_batches, activation)
    assert not held.live
    return held.peak


@pytest.mark.verifies(GPIPE, ONE_F_ONE_B)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_ranks_follow(world, size):
    for m in (1, size, 2 * size + 1):
        assert world(size).run(kept_at_most, gpipe_step, m) == [m] * size
        expected = [min(m, size - rank) for rank in range(size)]
        assert world(size).run(kept_at_most, one_f_one_b_step, m) == expected


# --- what is sent, in which order -----------------------------------------------------


class Noted:
    """torch.distributed, noting what a rank asks for: lists of ("send", 1), ..."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def recv(self, tensor, group_src, group=None):
        self.asked.append([("recv", group_src)])
        return dist.recv(tensor, group=group, group_src=group_src)

    def isend(self, tensor, group_dst, group=None):
        self.asked.append([("send", group_dst)])
        return dist.isend(tensor, group=group, group_dst=group_dst)

    def P2POp(self, op, tensor, group=None, group_peer=None):
        op = dist.isend if op == self.isend else op
        return dist.P2POp(op, tensor, group=group, group_peer=group_peer)

    def batch_isend_irecv(self, calls):
        kinds = {dist.isend: "send", dist.irecv: "recv"}
        self.asked.append([(kinds[call.op], call.peer) for call in calls])
        return dist.batch_isend_irecv(calls)


def asked_for(name: str, micro_batches: int) -> list[list[tuple[str, int]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    file, noted = FILES[name], Noted()
    activation = torch.empty(ROWS, LENGTH, HIDDEN, dtype=torch.float64)
    with replaced(file, "dist", noted):
        STEPS[name](
            stage_of(whole_model(), rank, size),
            loss_fn,
            *batch_of(1, micro_batches),
            micro_batches,
            activation,
        )
    return noted.asked


def left_waiting(ranks: list[list[list[tuple[str, int]]]]) -> list[list[Any]]:
    """What never ends if a send lasts until it is received, and none runs behind.

    A rank's calls run one after another; those of one batch, together. Nothing tells
    messages apart: no tags.
    """
    left = [deque([*call] for call in asked) for asked in ranks]
    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(left):
            for kind, peer in list(calls[0]) if calls else []:
                other = ("recv" if kind == "send" else "send", rank)
                if left[peer] and other in left[peer][0]:
                    calls[0].remove((kind, peer))
                    left[peer][0].remove(other)
                    moved = True
        for calls in left:
            while calls and not calls[0]:
                calls.popleft()
    return [list(calls) for calls in left]


@pytest.mark.verifies(GPIPE, ONE_F_ONE_B)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_rank_waits_for_ever_even_if_every_send_waits_for_its_receive(world, size):
    for name in STEPS:
        for m in {1, size - 1, size, 2 * size + 1}:
            asked = world(size).run(asked_for, name, m)
            calls = sum(len(call) for calls in asked for call in calls)
            assert calls == 2 * 2 * m * (size - 1), "each message twice"
            assert left_waiting(asked) == [[]] * size, (name, m)
            if name == "one_f_one_b_step" and m >= size:
                apart = [[[one] for call in calls for one in call] for calls in asked]
                assert left_waiting(apart) != [[]] * size
