"""The page on memory math: bytes of real runs, and the plan's beside them.

A run counts the bytes of distinct storages: weights, gradients and optimizer state when
the second backward has ended, and what autograd saved at most until then. Adam's count
of steps, one number a tensor, is left out.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from xtrain.model import XtrainConfig
from xtrain.plan import (
    DeviceMemory,
    Layout,
    ModelShape,
    decoder_activations,
    decoder_layer_activations,
    device_parameters,
    held_micro_batches,
    memory_per_device,
)
from xtrain.train import wrapped_model
from xtrain.zero import AdamW, MixedPrecisionOptimizer

from ... import runs
from ...values import value

SIZES: dict[str, Any] = {
    "vocab_size": 52, "hidden_size": 21, "intermediate_size": 36, "head_dim": 6,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BATCH, TOKENS, MICRO_BATCHES = 2, 24, 4
"""Sequences of a micro-batch on each data rank, their tokens; of a pipeline's step."""


@dataclass(frozen=True)
class Case:
    """A mesh, a wrapper over its data ranks, and what the weights are kept in."""

    mesh: dict[str, int] = field(default_factory=dict)
    """Sizes of the axes, outermost first."""
    wrapper: str = ""
    bf16: bool = False
    """16-bit weights with fp32 masters; otherwise everything is fp32."""
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    @property
    def recipe(self) -> str:
        """What our code keeps of a parameter when backward has ended."""
        if not self.bf16:
            return "fp32"
        return "megatron18" if self.wrapper in ("ddp", "zero 2") else "zero16"

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the model; experts only where there are ranks for them."""
        return SIZES | (EXPERTS if self.size("expert") > 1 else {})

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**self.sizes)

    @property
    def layout(self) -> Layout:
        """The same for `xtrain.plan`, where expert ranks are among the data ranks."""
        pipeline, expert = self.size("pipeline"), self.size("expert")
        return Layout(
            data=self.size("data") * self.size("expert_data") * expert,
            tensor=self.size("tensor"), pipeline=pipeline,
            context=self.size("context"), expert=expert,
            zero={"zero 1": 1, "zero 2": 2, "fsdp": 3}.get(self.wrapper, 0),
            sequence_parallel=self.sequence_parallel, micro_batch=BATCH,
            micro_batches=MICRO_BATCHES if pipeline > 1 else 1,
        )  # fmt: skip

    def stage(self, rank: int) -> int:
        """The pipeline is the outermost axis."""
        return rank // (self.ranks // self.size("pipeline"))


CASES = {
    "one device": Case(),
    "one device, bf16": Case(bf16=True),
    "DDP, bf16": Case({"data": 4}, "ddp", bf16=True),
    "ZeRO-1, bf16": Case({"data": 4}, "zero 1", bf16=True),
    "ZeRO-2, bf16": Case({"data": 4}, "zero 2", bf16=True),
    "FSDP": Case({"data": 4}, "fsdp"),
    "ZeRO-2 on 3 ranks, bf16": Case({"data": 3}, "zero 2", bf16=True),
    "FSDP on 3 ranks": Case({"data": 3}, "fsdp"),
    "tensor ranks": Case({"tensor": 2}),
    "tensor ranks, sequence parallel": Case({"tensor": 2}, sequence_parallel=True),
    "context ranks": Case({"context": 2}),
    "pipeline": Case({"pipeline": 2}),
    "expert ranks": Case({"expert": 2}),
    "tensor ranks, ZeRO-1, bf16": Case({"data": 2, "tensor": 2}, "zero 1", bf16=True),
    "context ranks, FSDP": Case({"data": 2, "context": 2}, "fsdp"),
    "pipeline, ZeRO-1, bf16": Case({"pipeline": 2, "data": 2}, "zero 1", bf16=True),
    "expert ranks, ZeRO-1, bf16": Case(
        {"expert_data": 2, "expert": 2}, "zero 1", bf16=True
    ),
}


def bytes_of_cases() -> dict[str, dict[str, int]]:
    """On every rank: the bytes of each case with as many ranks as there are."""
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
        torch.manual_seed(0)
        dtype = torch.bfloat16 if case.bf16 else torch.float32
        config = XtrainConfig(**case.sizes)
        self.model = wrapped_model(config, case.layout, dtype=dtype)
        kind: Any = partial(MixedPrecisionOptimizer, optimizer_class=AdamW)
        if case.wrapper.startswith("zero"):
            kind = AdamW
        groups = [{"params": list(self.model.parameters())}]
        self.optimizer: Any = self.model.optimizer(kind, groups, lr=1e-3)

    def backward(self) -> None:
        """Forward, backward and the sums of gradients of a step."""
        rows = BATCH * (1 if self.model.is_whole else MICRO_BATCHES)
        tokens = torch.randint(0, SIZES["vocab_size"], (rows, TOKENS))
        if self.model.is_whole:
            self.model(tokens, tokens).backward()
        else:
            self.model.runner().step(tokens, tokens)
        for part in self.model.parts:
            part.sync_gradients()

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
        units = getattr(self.model.stages[0].module, "units", ())
        return [group.full for unit in units for group in unit.flat_groups]


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of all memory behind some tensors, each storage once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in found.values())


class Holder(list):
    """Stands for a saved tensor; can be referred to weakly."""


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

    def pack(self, tensor: Tensor) -> Holder:
        holder, storage = Holder((tensor,)), tensor.untyped_storage()
        if storage._cdata not in self.left_out:
            self.count(storage._cdata, 1, storage.nbytes())
            weakref.finalize(holder, self.count, storage._cdata, -1, storage.nbytes())
        return holder

    def count(self, key: int, more: int, nbytes: int) -> None:
        before = self.holders.get(key, 0)
        self.holders[key] = before + more
        if 0 in (before, before + more):
            self.now += more * nbytes
            self.most = max(self.most, self.now)


# -------------------------------------------------------------- beside the prediction


def measured(case: Case) -> list[dict[str, int]]:
    """What the run found, by rank."""
    (name,) = (name for name, one in CASES.items() if one == case)
    return [found[name] for found in runs.remembered(bytes_of_cases, case.ranks)]


def predicted(case: Case, rank: int) -> DeviceMemory:
    """By `memory_per_device`."""
    return memory_per_device(case.shape, case.layout, TOKENS, rank=case.stage(rank),
                             recipe=case.recipe)  # fmt: skip


def predicted_activations(case: Case, rank: int) -> float | None:
    """Bytes that autograd keeps at most; None where there is no formula."""
    shape, layout, stage = case.shape, case.layout, case.stage(rank)
    if shape.num_local_experts:
        return None
    sizes = shape, BATCH, TOKENS // layout.context
    cut: dict[str, Any] = {
        "itemsize": 2 if case.bf16 else 4, "tensor": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
    }  # fmt: skip
    layer = decoder_layer_activations(*sizes, **cut)
    kept = device_parameters(shape, layout, stage).dense_layers * layer
    if stage == layout.pipeline - 1:
        whole = decoder_activations(*sizes, **cut)
        kept += whole - shape.num_hidden_layers * layer
    return kept * held_micro_batches(layout, stage)


@value
def measured_runs() -> list[dict[str, Any]]:
    """Of each run, or of each position of its pipeline: bytes beside the prediction."""
    shown = []
    for name, case in CASES.items():
        found = measured(case)
        for stage in range(case.size("pipeline")):
            here = [r for r in range(case.ranks) if case.stage(r) == stage]
            kept = predicted_activations(case, here[0])
            at = (", first stage", ", last stage")[stage]
            shown.append({
                "name": name + at * (case.size("pipeline") > 1), "ranks": case.ranks,
                **found[here[0]], "plan": predicted(case, here[0]).states,
                "activations": max(found[r]["activations"] for r in here),
                "kept": "depends on the routing" if kept is None else kept,
            })  # fmt: skip
    return shown
