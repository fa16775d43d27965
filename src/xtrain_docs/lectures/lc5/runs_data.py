"""Runs on pipeline and data ranks: what they send over which, and when they reduce."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.model.stages import DecoderStage, stage_spans
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

CONFIG = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
)
ROWS, SEQUENCE, DATA = 2, 8, 2  # rows of a micro-batch


class Run:
    """A rank's stages under a wrapper over two data ranks, a runner, an optimizer."""

    def __init__(self, wrapper: str, name: str, micro_batches: int):
        mesh = init_mesh((dist.get_world_size() // DATA, DATA), ("pipeline", "data"))
        pipeline, self.data = (mesh[axis].get_group() for axis in ("pipeline", "data"))
        schedule = SCHEDULES[name](pipeline.size(), micro_batches)
        self.stages = XtrainModel.stages(CONFIG, mesh, schedule)
        loss_fn = self.stages[0].module.loss_fn
        self.weights = sum(p.nbytes for s in self.stages for p in s.parameters())
        self.optimizer = self.wrap(wrapper)
        self.runner = PipelineRunner(
            self.stages, schedule, loss_fn, pipeline, data_group=self.data
        )
        self.rows = torch.ones(ROWS * micro_batches, SEQUENCE, dtype=torch.long)
        self.runner.step(self.rows, self.rows)  # shapes are agreed on here
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wrap(self, wrapper: str) -> torch.optim.Optimizer:
        options: dict[str, Any] = {
            "process_group": self.data,
            "gradient_reduction": "sum",
            "collectives": RING,  # whose messages a ledger sees
        }
        every = [p for stage in self.stages for p in stage.parameters()]
        if wrapper.startswith("zero"):
            optimizer = ZeroOptimizer(
                every, torch.optim.AdamW, int(wrapper[-1]), **options
            )
            for stage in self.stages:
                stage.reduction = optimizer
            return optimizer
        for stage in self.stages:
            if wrapper == "ddp":
                stage.module = DistributedDataParallel(stage.module, **options)
            if wrapper.startswith("fsdp"):
                stage.module = FullyShardedDataParallel(
                    stage.module,
                    blocks=[DecoderLayer],
                    reshard_after_forward=wrapper == "fsdp",
                    **options,
                )
        return torch.optim.AdamW([p for s in self.stages for p in s.parameters()])

    def root_bytes(self) -> int:
        """Of what FSDP gathers once a step: all that is in no decoder layer."""
        return sum(
            p.numel() * p.element_size()
            for stage in self.stages
            for name, p in whole_parameters(stage.index, stage.count)
            if not name.startswith("layers.")
        )


def whole_parameters(index: int, count: int) -> list[tuple[str, torch.Tensor]]:
    """A stage's parameters as they were before a wrapper cut them."""
    span = stage_spans(CONFIG, count)[index]
    return list(DecoderStage(CONFIG, None, span, device="meta").named_parameters())


def sent(wrapper: str, micro_batches: int) -> dict[str, int]:
    """Bytes that this rank sends in the second step of 1F1B, by whom they go to."""
    run = Run(wrapper, "one_f_one_b", micro_batches)
    peers = set(dist.get_process_group_ranks(run.data))

    def over_data(ledger: CommLedger) -> int:
        sends = [e for e in ledger.events if e.kind == "send" and e.peer in peers]
        return sum(event.nbytes or 0 for event in sends)

    with CommLedger() as in_step:
        run.runner.step(run.rows, run.rows)
    with CommLedger() as in_update:
        run.optimizer.step()
    return {
        "weights": run.weights,
        "root": run.root_bytes(),
        "step": over_data(in_step),
        "pipeline": in_step.bytes_sent - over_data(in_step),
        "update": over_data(in_update),
    }


def executed(name: str, micro_batches: int) -> list[str]:
    """What this rank did in a step under DDP, without its messages to other stages."""
    run = Run("ddp", name, micro_batches)
    run.runner.step(run.rows, run.rows)
    kinds = ("F", "B", "W", "BW", "REDUCE")
    return [str(action) for action in run.runner.executed if action.kind in kinds]
