"""What trains a model is freed with the last reference to it, and its group with it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import on_cpu
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import one_f_one_b
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer


def zero(stage):
    def wrap(module, group):
        parameters = list(module.parameters())
        return ZeroOptimizer(
            parameters, torch.optim.SGD, lr=0.1, stage=stage, process_group=group
        )

    return wrap


def pipeline(module, group):
    stage = PipelineStage(module, dist.get_rank(), dist.get_world_size())
    schedule = one_f_one_b(dist.get_world_size(), 2)
    return PipelineRunner(stage, schedule, lambda y, _: (y.sum(), 1), group)


KINDS = {
    "naive": lambda module, group: NaiveDataParallel(module, process_group=group),
    "ddp": lambda module, group: DistributedDataParallel(module, process_group=group),
    "zero1": zero(1),
    "zero2": zero(2),
    "fsdp": lambda module, group: FullyShardedDataParallel(module, process_group=group),
    "pipeline": pipeline,
}


def alive_after(kind):
    """Which of wrapper, module and group are alive when nothing refers to them."""
    group = dist.new_group()
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = KINDS[kind](module, group)
    batch = torch.ones(2, 4)
    if kind == "pipeline":
        wrapped.step(batch, batch)
    else:
        (wrapped if isinstance(wrapped, nn.Module) else module)(batch).sum().backward()
        if isinstance(wrapped, ZeroOptimizer):
            wrapped.step()
    references = {"wrapper": wrapped, "module": module, "group": group}
    references = {name: weakref.ref(x) for name, x in references.items()}
    dist.barrier()
    dist.destroy_process_group(group)
    del wrapped, module, group, batch
    if not on_cpu():  # the thread of a device keeps its last graph until its next one
        torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    gc.collect()  # the first one frees the module, whose buffers kept the group
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.verifies("xtrain.comm.backward:weakly")
def test_a_wrapper_its_module_and_its_group_are_freed(world, kind):
    assert world(2).run(alive_after, kind) == [[], []]
