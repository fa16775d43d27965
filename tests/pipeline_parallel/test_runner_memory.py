"""Nothing lives longer than it is needed, however many micro-batches and steps."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.pipeline_parallel.pipelines import batch, layers, make, own, squares
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.pipeline_parallel.micro_batch import MicroBatch


class Alive:
    """Memory that has been handed out, and the most of it that lived at a time."""

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.most = 0

    def add(self, tensor: Tensor) -> None:
        self.refs = [ref for ref in self.refs if not ref.expired()]
        self.refs.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, len(self.refs))

    def count(self) -> int:
        return sum(not ref.expired() for ref in self.refs)


class Observed(nn.Module):
    """A stage's module that notes what it takes and returns, and their gradients."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.inputs, self.outputs, self.gradients = Alive(), Alive(), Alive()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.inputs.add(x)
            x.register_hook(self.gradients.add)
        y = self.module(x)
        self.outputs.add(y)
        return y


def lived(name: str, m: int, steps: int) -> dict[str, list[int]]:
    """The most inputs, outputs and gradients of a stage that lived; what is left."""
    schedule = make(name, dist.get_world_size(), m)
    modules = [Observed(module) for module in layers(schedule.stages)]
    runner = PipelineRunner(own(modules, schedule, dist.get_rank()), schedule, squares)
    mine = [stage.module for stage in runner.stages.values()]
    gc.disable()  # what lives in a cycle counts as alive
    for _ in range(steps):
        loss = runner.step(*batch(2 * m))
    kinds = ("inputs", "outputs", "gradients")
    found = {
        kind: [max(getattr(module, kind).most for module in mine)] for kind in kinds
    }
    found["left"] = [sum(getattr(m, kind).count() for m in mine) for kind in kinds]
    runner.evaluate(*batch(2 * m))
    found["left"] += [sum(module.outputs.count() for module in mine)]
    gc.enable()
    assert torch.isfinite(loss)
    return found


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.messages:sends_that_arrived",
    "xtrain.pipeline_parallel.micro_batch:MicroBatch",
)
def test_memory_is_bounded_by_the_ranks_and_nothing_is_left_after_a_step(world):
    ranks = 3
    for name in ("one_f_one_b", "zb_h1"):
        few = world(ranks).run(lived, name, 2 * ranks, 2)
        many = world(ranks).run(lived, name, 6 * ranks, 3)
        for rank in range(ranks):
            for kind in ("inputs", "outputs", "gradients"):
                assert few[rank][kind] == many[rank][kind], (name, rank, kind)
                assert many[rank][kind][0] <= ranks + 2, (name, rank, kind)
            assert many[rank]["left"] == [0, 0, 0, 0], (name, rank)
    for name in ("gpipe", "zb_v", "dualpipe"):
        for result in world(2).run(lived, name, 4, 2):
            assert result["left"] == [0, 0, 0, 0], name


@pytest.mark.verifies("xtrain.pipeline_parallel.micro_batch:MicroBatch")
def test_between_forward_and_backward_the_output_is_not_kept():
    module = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    micro_batch, outputs = MicroBatch(module, splits=False), (module(x),)
    memory = StorageWeakRef(outputs[0].untyped_storage())
    micro_batch.keep((x,), outputs)
    del outputs
    assert memory.expired()
    micro_batch.begin_backward((torch.ones(2, 3),))()
    (gradient,) = micro_batch.end_backward()
    assert torch.equal(gradient, module.weight.sum(0).expand(2, 3))
    assert micro_batch.inputs == () and micro_batch.outputs == []
