"""The optimizer of a recipe, over whatever a wrapper leaves on this rank.

adamw   all parameters; norms and biases have no weight decay
muon    the matrices of layers, each orthogonalised whole by one rank;
        embedding, head, norms and biases by AdamW
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from xtrain.checkpoint import Shard
from xtrain.comm.mesh import joined_group, sizes_of
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.wrap import WrappedModel
from xtrain.zero import Muon
from xtrain.zero.muon_layout import NOT_HIDDEN, MatrixLayout, shards_in


def make_optimizer(model: WrappedModel, spec: OptimizerSpec) -> Optimizer:
    """AdamW of all parameters, or Muon of the matrices and AdamW of the others."""
    options: dict[str, Any] = {
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
    }
    if spec.kind == "adamw":
        return model.optimizer(AdamW, lr=spec.lr, **options)
    if model.kind in ("zero1", "zero2"):
        raise ValueError(
            f"optimizer.kind='muon' with {model.kind}, which cuts matrices anywhere: "
            "layout.zero=0 or 3"
        )
    layout = layout_of(model)
    hidden = {shard.tensor for shard in layout.shards if is_hidden(shard.name, shard)}
    muon = Muon(
        [p for p in model.parameters() if p in hidden],
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        ns_steps=spec.ns_steps,
        adjust_lr_fn=spec.adjust_lr_fn,
        ns_dtype=torch.bfloat16 if spec.ns_dtype == "bfloat16" else torch.float32,
        layout=layout,
    )
    rest = []
    for group in model.parameter_groups():
        others = [p for p in group["params"] if p not in hidden]
        rest += [{**group, "params": others}] * bool(others)
    return Together([muon, AdamW(rest, lr=spec.lr, **options)])


def layout_of(model: WrappedModel) -> MatrixLayout:
    """What this rank holds of all its stages, by the names of the whole model.

    Its group are the ranks that hold parts of the same stages: all axes but "pipeline".
    """
    shards = [shard for stage in model.stages for shard in shards_in(stage.module)]
    if model.is_whole or model.mesh is None:
        return MatrixLayout(shards, model.all_ranks())
    axes = [axis for axis in sizes_of(model.mesh) if axis != "pipeline"]
    return MatrixLayout(shards, joined_group(model.mesh, tuple(axes)))


def is_hidden(name: str, shard: Shard) -> bool:
    """A matrix, or a stack of them, that is neither embedding nor head."""
    return len(shard.shape) in (2, 3) and not any(part in name for part in NOT_HIDDEN)


class Together(Optimizer):
    """Several optimizers of different parameters as one: their groups, one state."""

    def __init__(self, optimizers: list[Optimizer]):
        super().__init__([g for o in optimizers for g in o.param_groups], {})
        self.optimizers = optimizers
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Of each, one after the other."""
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
