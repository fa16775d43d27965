"""The runs whose bytes are measured: a small model under each wrapper and each axis.

Sizes are odd on purpose: neither the model nor a layer divides by the data ranks.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from xtrain.plan import Layout, ModelShape

SIZES: dict[str, Any] = {
    "vocab_size": 52,
    "hidden_size": 21,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
BATCH, SEQUENCE = 2, 24
"""Of a micro-batch on each data rank."""
MICRO_BATCHES = 4
"""Of a pipeline's step."""
WRAPPED = {"zero 1": 1, "zero 2": 2, "fsdp": 3}
"""The stage of each wrapper that shards."""


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
            tensor=self.size("tensor"),
            pipeline=pipeline,
            context=self.size("context"),
            expert=expert,
            zero=WRAPPED.get(self.wrapper, 0),
            sequence_parallel=self.sequence_parallel,
            micro_batch=BATCH,
            micro_batches=MICRO_BATCHES if pipeline > 1 else 1,
        )

    def pipeline_rank(self, rank: int) -> int:
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
