"""Functions that run on every rank: the bytes of a step, by what they hold.

    step 1                         makes Adam's moments
    step 2   forward, backward     what autograd saves, at most
             end of backward       weights, gradients, optimizer state

Bytes are those of distinct storages, so views of one flat tensor count once, padding
included. Adam's count of steps, one number a tensor, is left out.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import one_f_one_b
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
)

from .runs_memory_cases import (
    BATCH,
    CASES,
    MICRO_BATCHES,
    SEQUENCE,
    SIZES,
    Case,
)


def bytes_of_cases() -> dict[str, dict[str, int]]:
    """`bytes_of` every case with as many ranks as there are."""
    ranks = dist.get_world_size()
    return {name: bytes_of(case) for name, case in CASES.items() if case.ranks == ranks}


def bytes_of(case: Case) -> dict[str, int]:
    """Bytes that this rank holds at the end of backward, and saves until then."""
    training = Training(case)
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    saved = Saved([*training.model.parameters(), *training.gathered()])
    with saved:
        training.backward()
    return {**training.states(), "activations": saved.most}


class Training:
    """A case's model and optimizer on this rank."""

    def __init__(self, case: Case):
        self.case, sizes = case, case.mesh
        torch.manual_seed(0)
        mesh = init_mesh(tuple(sizes.values()), tuple(sizes)) if sizes else None
        self.config = XtrainConfig(**case.sizes)
        self.dtype = torch.bfloat16 if case.bf16 else torch.float32
        self.axis = next((a for a in ("data", "expert_data") if a in sizes), None)
        options: dict[str, Any] = {"gradient_reduction": "sum"}
        if mesh is not None and self.axis is not None:
            options["process_group"] = mesh[self.axis].get_group()
        self.runner: PipelineRunner | None = None
        pipeline = case.size("pipeline")
        if pipeline > 1:
            schedule = one_f_one_b(pipeline, MICRO_BATCHES)
            stages = XtrainModel.stages(self.config, mesh, schedule, dtype=self.dtype)
            self.bare: Any = stages[0].module
        else:
            self.bare = XtrainModel(
                self.config,
                mesh,
                sequence_parallel=case.sequence_parallel,
                dtype=self.dtype,
            )
        self.model: Any = self.bare
        if case.wrapper == "ddp":
            self.model = DistributedDataParallel(self.bare, **options)
        elif case.wrapper == "fsdp":
            options["blocks"] = [DecoderLayer]
            self.model = FullyShardedDataParallel(self.bare, **options)
        self.optimizer = self.optimizer_of(options)
        if pipeline > 1:
            stages[0].reduction = self.optimizer if case.wrapper else None
            self.runner = PipelineRunner(
                stages,
                schedule,
                self.bare.loss_fn,
                group=mesh["pipeline"].get_group(),  # type: ignore[index]
                data_group=options.get("process_group"),
            )

    def optimizer_of(self, options: dict[str, Any]) -> Any:
        parameters = list(self.model.parameters())
        if self.case.wrapper.startswith("zero"):
            stage = int(self.case.wrapper[-1])
            return ZeroOptimizer(parameters, AdamW, stage=stage, lr=1e-3, **options)
        return MixedPrecisionOptimizer(parameters, AdamW, lr=1e-3)

    def backward(self) -> None:
        """Forward, backward and the sums of gradients of a step."""
        rows = BATCH * (MICRO_BATCHES if self.runner is not None else 1)
        tokens = torch.randint(0, SIZES["vocab_size"], (rows, SEQUENCE))
        if self.runner is not None:
            self.runner.step(tokens, tokens)
        else:
            self.model(tokens, tokens).backward()
            skip = (self.axis,) if self.case.wrapper and self.axis else ()
            self.bare.sync_gradients(skip=skip)

    def states(self) -> dict[str, int]:
        """Bytes of weights, gradients, and the optimizer's state."""
        parameters = list(self.model.parameters())
        inner = self.optimizer.optimizer
        stepped = [p for group in inner.param_groups for p in group["params"]]
        moments = [t for state in inner.state.values() for t in state.values()]
        whole = [b.full_grad for b in getattr(self.optimizer, "buckets", ())]
        gradients = [*(p.grad for p in (*parameters, *stepped)), *whole]
        masters = storages([*parameters, *stepped]) - storages(parameters)
        return {
            "weights": storages([*parameters, *self.gathered()]),
            "gradients": storages(g for g in gradients if g is not None),
            "optimizer": masters + storages(t for t in moments if t.dim()),
        }

    def gathered(self) -> list[Tensor]:
        """FSDP's buffers of whole weights: without memory, once backward is over."""
        units = getattr(self.model, "units", ())
        return [group.full for unit in units for group in unit.flat_groups]


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of all memory behind some tensors, each storage once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class Saved(saved_tensors_hooks):
    """Most bytes that autograd keeps at a time: each storage once, no parameters.

    A saved tensor is packed into a holder. When backward drops the last holder of a
    storage, its bytes are free.
    """

    def __init__(self, left_out: Iterable[Tensor]):
        self.left_out = {tensor.untyped_storage()._cdata for tensor in left_out}
        self.holders: dict[int, int] = {}
        self.now = self.most = 0
        super().__init__(self.pack, lambda holder: holder[0])

    def pack(self, tensor: Tensor) -> "Holder":
        holder = Holder((tensor,))
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.left_out:
            return holder
        self.holders[key] = self.holders.get(key, 0) + 1
        if self.holders[key] == 1:
            self.now += nbytes
            self.most = max(self.most, self.now)
        weakref.finalize(holder, self.drop, key, nbytes)
        return holder

    def drop(self, key: int, nbytes: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.now -= nbytes


class Holder(list):
    """Stands for a saved tensor; can be referred to weakly."""
