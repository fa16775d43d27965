"""Stages of the decoder driven by hand, one stage of a micro-batch after the other."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.model.test_on_a_mesh import batch, config_of
from xtrain.checkpoint import Shard
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, clip_stages_grad_norm_
from xtrain.schedules import SCHEDULES

ROWS, MICRO = 8, 4  # of a step's batch of all data ranks; micro-batches of each


class Layout(NamedTuple):
    """A schedule over `pipeline` ranks, each of them `data` x `tensor` ranks."""

    schedule: str
    pipeline: int
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def made(self):
        return SCHEDULES[self.schedule](self.pipeline, 2 * self.pipeline)


class StageTraining:
    """This rank's stages and one optimizer of all of them."""

    def __init__(self, layout, changes, dtype=torch.float64, lr=0.03, **options):
        sizes, axes = (layout.pipeline, layout.data, layout.tensor), AXES
        self.layout, self.mesh = layout, init_mesh(sizes, axes)
        self.schedule = layout.made()
        self.stages = XtrainModel.stages(
            config_of(**changes), self.mesh, self.schedule, dtype=dtype, **options
        )
        self.modules = [stage.module for stage in self.stages]
        self.optimizer = torch.optim.AdamW(
            [p for module in self.modules for p in module.parameters()], lr=lr
        )

    def train(self, first, last, max_norm=None):
        """Loss and norm of each step."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.accumulate(step)
            norm = None if max_norm is None else self.clip(max_norm)
            found.append((loss, norm))
            self.optimizer.step()
        return found

    def clip(self, max_norm):
        return clip_stages_grad_norm_(self.stages, max_norm).item()

    def shards(self) -> list[Shard]:
        return [shard for module in self.modules for shard in module.shards()]

    def named_parameters(self):
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield module, name, parameter

    def accumulate(self, step):
        """All gradients of a step, and its loss: what a runner will do."""
        tokens, labels = batch(step, rows=ROWS)
        count = (labels != -100).sum()
        here = self.mesh["data"].get_local_rank()
        tokens, labels = (t.chunk(self.layout.data)[here] for t in (tokens, labels))
        total = torch.zeros((), dtype=torch.float64)
        for i in range(MICRO):
            part = [t.chunk(MICRO)[i] for t in (tokens, labels)]
            # The second half of the micro-batches goes the other way, if one does.
            number = i * self.schedule.micro_batches // MICRO
            total += self.there_and_back(number, *part, count)
        dist.all_reduce(total, group=self.mesh["pipeline"].get_group())
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        for module in self.modules:
            module.sync_gradients()
        self.sum_over_holders()
        return (total / count).item()

    def there_and_back(self, number, tokens, labels, count):
        """One micro-batch through all stages, and its gradients back; its loss sum."""
        group, rank = (
            self.mesh["pipeline"].get_group(),
            self.mesh["pipeline"].get_local_rank(),
        )
        own = {stage.index: stage for stage in self.stages}
        last, total, kept = self.schedule.stages - 1, 0.0, {}

        def rank_of(stage):
            return self.schedule.rank_of(stage, number)

        x = tokens
        for stage in range(last + 1):
            if rank_of(stage) == rank:
                if stage > 0:
                    x = x.detach().requires_grad_()
                out = own[stage](x)
                kept[stage] = x, out
                x = out
                if stage == last:
                    total, n = own[stage].module.loss_fn(out, labels)
                    assert n == (labels != -100).sum()
                    kept[stage] = kept[stage][0], total / count
            if stage < last and rank_of(stage) != rank_of(stage + 1):
                x = move(x, rank_of(stage), rank_of(stage + 1), rank, group)
        gradient = None
        for stage in range(last, -1, -1):
            if rank_of(stage) == rank:
                x, out = kept[stage]
                torch.autograd.backward(out, gradient if stage < last else None)
                gradient = x.grad
            if stage > 0 and rank_of(stage) != rank_of(stage - 1):
                gradient = move(
                    gradient, rank_of(stage), rank_of(stage - 1), rank, group
                )
        return total.item() if isinstance(total, torch.Tensor) else total

    def sum_over_holders(self):
        """Mirrored stages and tied embeddings: the sum over all that hold a name."""
        held = [(name, p.grad) for _, name, p in self.named_parameters()]
        everywhere = [None] * self.layout.pipeline
        group = self.mesh["pipeline"].get_group()
        dist.all_gather_object(everywhere, held, group=group)
        for _, name, parameter in self.named_parameters():
            same = [g for rank in everywhere for n, g in rank if n == name]
            parameter.grad = torch.stack([g for g in same if g is not None]).sum(0)


AXES = ("pipeline", "data", "tensor")


def move(x, source, target, rank, group):
    """What `source` has, on `target`."""
    if rank == source:
        dist.send_object_list([x.detach()], group_dst=target, group=group)
    if rank == target:
        box = [None]
        dist.recv_object_list(box, group_src=source, group=group)
        return box[0]
    return x


def one_process(changes, steps, lr=0.03, max_norm=None):
    """The whole model after these steps: weights, and (loss, norm) of each."""
    model, found = XtrainModel(config_of(**changes), dtype=torch.float64), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*batch(step, rows=ROWS))
        loss.backward()
        norm = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        found.append((loss.item(), norm))
        optimizer.step()
    return model, found
