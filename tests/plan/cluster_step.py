"""A training step of an `XtrainModel` in a layout of the plan, counted by a cluster.

Every rank is a thread with real tensors on the CPU, in fp32. The second step counts: in
the first one the ranks of a pipeline tell each other the shapes of their messages.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from xtrain.cluster import VirtualCluster, flat
from xtrain.cluster.recorder import RunTransfer
from xtrain.comm import init_mesh
from xtrain.comm.mesh import mesh_coordinates
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel, batch_group
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.plan import Layout
from xtrain.schedules import SCHEDULES, Schedule
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

GRADIENTS = "gradients and weights"
RECOMPUTE = {"none": "none", "selective": "selective", "full": "layer"}
"""The option of the model for what a layout of the plan has."""
WHOLE = {"all_reduce": 2, "barrier": 0}
"""How often the whole tensor crosses from each rank but one to the next, if not once:
a ring's 2 (n-1)/n of each of n ranks are 2 (n-1) of the tensor."""


def axes_of(layout: Layout) -> dict[str, int]:
    """The mesh of the model: with experts the data axis is two."""
    data = {"data": layout.data}
    if layout.expert > 1:
        data = {"expert_data": layout.data // layout.expert, "expert": layout.expert}
    inner = {"context": layout.context, "tensor": layout.tensor}
    return {"pipeline": layout.pipeline, **data, **inner}


def schedule_of(layout: Layout) -> Schedule:
    chunks = (layout.chunks,) if layout.schedule == "interleaved" else ()
    sizes = layout.pipeline, layout.micro_batches, *chunks
    return SCHEDULES[layout.schedule](*sizes)


class OneRank:
    """The part of a layout's training that one rank has.

    ZeRO is over the axis "data", or over "expert_data" where there are experts.
    """

    def __init__(self, config: XtrainConfig, layout: Layout):
        self.layout, sizes = layout, axes_of(layout)
        mesh = init_mesh(tuple(sizes.values()), tuple(sizes))
        data = "data" if "data" in sizes else "expert_data"
        self.shared: dict[str, Any] = {
            "process_group": mesh[data].get_group(),
            "gradient_reduction": "sum",
        }
        self.is_alone = sizes[data] == 1
        options: dict[str, Any] = {
            "sequence_parallel": layout.sequence_parallel,
            "context_attention": layout.context_way,
            "recompute": RECOMPUTE[layout.recompute],
        }
        self.bare: list[Any]
        if layout.pipeline == 1:
            self.bare = [XtrainModel(config, mesh, **options)]
            self.called: list[Any] = [self.wrapped(self.bare[0])]
        else:
            schedule = schedule_of(layout)
            stages = XtrainModel.stages(config, mesh, schedule, **options)
            self.bare = [stage.module for stage in stages]
            for stage in stages:
                stage.module = self.wrapped(stage.module)
            self.called = [stage.module for stage in stages]
        parameters = [p for module in self.called for p in module.parameters()]
        if layout.zero in (1, 2) and not self.is_alone:
            self.optimizer: torch.optim.Optimizer = ZeroOptimizer(
                parameters, torch.optim.AdamW, stage=layout.zero, **self.shared
            )
        else:
            self.optimizer = torch.optim.AdamW(parameters)
        if layout.pipeline > 1:
            if isinstance(self.optimizer, ZeroOptimizer):
                for stage in stages:
                    stage.reduction = self.optimizer
            last = next((m for m in self.bare if m.has_head), None)
            loss_fn = last.loss_fn if last else no_loss
            group, others = mesh["pipeline"].get_group(), batch_group(mesh)
            self.runner = PipelineRunner(
                stages, schedule, loss_fn, group, data_group=others
            )

    def wrapped(self, module: nn.Module) -> nn.Module:
        layout = self.layout
        if self.is_alone or layout.zero in (1, 2):
            return module
        if not layout.zero and (layout.context > 1 or layout.expert > 1):
            return module  # sync_gradients sums over all axes in one ring
        if self.layout.zero == 0:
            return DistributedDataParallel(module, **self.shared)
        whole = self.layout.reshard_after_forward
        return FullyShardedDataParallel(
            module, reshard_after_forward=whole, blocks=[DecoderLayer], **self.shared
        )

    def step(self, tokens: torch.Tensor) -> None:
        """All micro-batches; sums that are due once a step wait for the last one."""
        if self.layout.pipeline > 1:
            self.runner.step(tokens, tokens)
        else:
            parts = tokens.chunk(self.layout.micro_batches)
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                model = self.called[0]
                waits = left and isinstance(model, DistributedDataParallel)
                with model.no_sync() if waits else nullcontext():
                    model(part, part).backward()
        for module in self.bare:
            module.sync_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()


def two_steps(config: XtrainConfig, layout: Layout, sequence: int) -> None:
    rank, rows = OneRank(config, layout), layout.micro_batch * layout.micro_batches
    tokens = torch.randint(0, config.vocab_size, (rows, sequence))
    rank.step(tokens)
    torch.distributed.barrier()
    rank.step(tokens)


def no_loss(output: torch.Tensor, target: torch.Tensor) -> NoReturn:
    raise AssertionError("called where the last stage is not")


def sent(transfer: RunTransfer) -> int:
    """By all its ranks together."""
    if transfer.kind == "message":
        return transfer.nbytes
    others = len(transfer.ranks) - 1
    return WHOLE.get(transfer.kind, 1) * others * transfer.nbytes


def axis_of(transfer: RunTransfer, layout: Layout) -> str:
    """On which its ranks differ; sums over ranks with other tokens are `GRADIENTS`."""
    sizes = axes_of(layout)
    places = [mesh_coordinates(r, tuple(sizes.values())) for r in transfer.ranks]
    numbers = zip(sizes, zip(*places, strict=True), strict=True)
    axes = "+".join(name for name, at in numbers if len(set(at)) > 1)
    others = "data" in axes or (axes, transfer.kind) == ("context", "all_reduce")
    others = others or (axes == "expert" and transfer.kind != "all_to_all")
    return GRADIENTS if others else axes


def of_last_step(transfers: list[RunTransfer]) -> Iterator[RunTransfer]:
    barriers = [n for n, one in enumerate(transfers) if one.kind == "barrier"]
    yield from (one for one in transfers[barriers[-1] :] if len(one.ranks) > 1)


def bytes_of_a_step(
    config: XtrainConfig, layout: Layout, sequence: int
) -> Counter[str]:
    """What all ranks together send, by axis."""
    links = flat(latency=0.0, bandwidth=1e9)
    cluster = VirtualCluster(layout.gpus, links, record=True)
    cluster.run(two_steps, config, layout, sequence)
    record = cluster.record
    assert record is not None
    transfers = list(record.transfers)
    crossed = sum(link.bytes for link in record.links.values())
    assert crossed == pytest.approx(sum(map(sent, transfers)), rel=1e-12, abs=0)
    found: Counter[str] = Counter()
    for one in of_last_step(transfers):
        found[axis_of(one, layout)] += sent(one)
    return +found
