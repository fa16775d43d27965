"""Steps of the trainer as trials, beside the same steps in transformers and torch.

    step = accumulate (forward, backward, sums over the mesh), clip, AdamW

Every side has the weights of one `XtrainModel`, the same batches and torch's fused
AdamW, and leaves the losses of its first steps, which must agree.

transformers   its Llama; on several ranks tensor parallel by DTensor and sharded over
               the data ranks by FSDP2, both of torch
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from xtrain.bench.race import Case, Trial
from xtrain.bench.training_trials import CHECKED, OPTIONS, config_of
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.hf_config import config_to_hf
from xtrain.plan import Layout
from xtrain.train import accumulate, clip_grad_norm
from xtrain.train.layouts import wrapped_model

MAX_NORM = 1.0
ADAMW = {**OPTIONS, "weight_decay": 0.0}
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and the batch of each data rank.

    A fifth to a third of the weights are the head's, as in small models.
    """

    width: int
    layers: int = 4
    batch: int = 4
    sequence: int = 256

    @property
    def config(self) -> XtrainConfig:
        return replace(config_of(self.width, self.layers), vocab_size=VOCABULARY)

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return 4 * self.config.parameters

    def batch_of(self, data_rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels, [batch, sequence]."""
        generator = torch.Generator().manual_seed(1 + data_rank)
        size = (2, self.batch, self.sequence)
        tokens, labels = torch.randint(VOCABULARY, size, generator=generator)
        return tokens, labels

    def own_batch(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Of this rank: tensor ranks are neighbours, then come data ranks."""
        return self.batch_of(dist.get_rank() // layout.tensor % layout.data)


LARGE = Workload(256)
SMALL = Workload(128, sequence=64)
"""Much to compute, and little."""

Step = Callable[[], Tensor]
"""One step; its loss, that of all data ranks."""


def checked(step: Step) -> Trial:
    """A trial that keeps the losses of the first steps."""
    losses, places = torch.zeros(CHECKED), iter(range(CHECKED))

    def call() -> None:
        loss, place = step(), next(places, None)
        if place is not None:
            losses[place] = loss.detach()

    return Trial(call, [losses])


def trainer(
    work: Workload, layout: Layout, case: Case, max_norm: float | None = MAX_NORM
) -> Trial:
    """A step of `xtrain.train`."""
    model = wrapped_model(work.config, layout)
    optimizer = model.optimizer(torch.optim.AdamW, **ADAMW)
    tokens, labels = work.own_batch(layout)

    def step() -> Tensor:
        loss = accumulate(model, tokens, labels, micro_batches=layout.micro_batches)
        if max_norm is not None:
            clip_grad_norm(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return checked(step)


def llama(work: Workload) -> nn.Module:
    """transformers' Llama with the weights of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = work.config
    theirs = LlamaForCausalLM(LlamaConfig(**config_to_hf(config, "float32")))
    theirs.config.use_cache = False
    names = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in XtrainModel(config).state_dict().items()
    }
    theirs.load_state_dict(names)
    return theirs


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Of labels that are shifted already."""
    found: Tensor = model(tokens, labels=labels, shift_labels=labels).loss
    return found


def transformers_alone(work: Workload, case: Case) -> Trial:
    """One process, as its users write it."""
    model = llama(work)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    tokens, labels = work.batch_of(0)

    def step() -> Tensor:
        loss = loss_of(model, tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return checked(step)


LAYER = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp"),
}
ROWS = {"o_proj": "self_attn", "down_proj": "mlp"}


def cut_by_dtensor(model: Any, mesh: DeviceMesh) -> None:
    """Columns and rows of the layers' matrices, and the vocabulary."""
    plan = {f"{part}.{name}": ColwiseParallel() for name, part in LAYER.items()}
    rows = {f"{part}.{name}": RowwiseParallel() for name, part in ROWS.items()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**plan, **rows})
    whole: Any = Replicate()
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
    }
    parallelize_module(model, mesh, outside)


def transformers_on_ranks(work: Workload, layout: Layout, case: Case) -> Trial:
    """FSDP2 over DTensor's tensor parallelism."""
    data, tensor = layout.data, layout.tensor
    model: Any = llama(work)
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        cut_by_dtensor(model, mesh["tensor"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    groups = by_mesh(model.parameters())
    optimizer = torch.optim.AdamW([{"params": g} for g in groups], **ADAMW)
    tokens, labels = work.own_batch(layout)

    def step() -> Tensor:
        loss = loss_of(model, tokens, labels)
        loss.backward()
        clip(groups)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / data
        dist.all_reduce(total, group=mesh["data"].get_group())
        return total

    return checked(step)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[DTensor]]:
    """Parameters on different meshes do not go into one call."""
    found: dict[DeviceMesh, list[DTensor]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        found.setdefault(parameter.device_mesh, []).append(parameter)
    return list(found.values())


def clip(groups: list[list[DTensor]]) -> None:
    """By the norm of all groups together."""
    norms = [get_total_norm([p.grad for p in g if p.grad is not None]) for g in groups]
    whole = torch.stack([n.full_tensor() for n in norms]).norm()  # type: ignore
    for group in groups:
        clip_grads_with_norm_(group, MAX_NORM, whole)
