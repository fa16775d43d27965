"""The optimizer of a recipe, over whatever a wrapper leaves on this rank.

adamw   all parameters; norms and biases have no weight decay
muon    the matrices of layers, each orthogonalised whole by one rank;
        embedding, head, norms and biases by AdamW
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from xtrain.checkpoint import Shard
from xtrain.comm.mesh import joined_group, sizes_of
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.wrap import WrappedModel
from xtrain.zero import Muon
from xtrain.zero.muon_layout import NOT_HIDDEN, MatrixLayout, shards_in


def make_optimizer(model: WrappedModel, spec: OptimizerSpec) -> Optimizer:
    """AdamW of all parameters, or Muon of the matrices and AdamW of the others."""
    if spec.kind == "adamw":
        return model.optimizer(AdamW, lr=spec.lr, **adamw_options(spec))
    layout = layout_of(model)
    hidden = {shard.tensor for shard in layout.shards if is_hidden(shard.name, shard)}
    groups = [{"params": [p for p in model.parameters() if p in hidden]}]
    for group in model.parameter_groups():
        others = [p for p in group["params"] if p not in hidden]
        groups.append({**group, "params": others})
    return model.optimizer(partial(muon_and_adamw, spec), groups, layout=layout)


def adamw_options(spec: OptimizerSpec) -> dict[str, Any]:
    return {"betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay}


def muon_and_adamw(
    spec: OptimizerSpec, groups: list[dict[str, Any]], layout: MatrixLayout
) -> "MuonAndAdamW":
    """Muon of the first group, AdamW of the others; of parameters or ZeRO's shards."""
    muon = Muon(
        groups[:1],
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        ns_steps=spec.ns_steps,
        adjust_lr_fn=spec.adjust_lr_fn,
        ns_dtype=torch.bfloat16 if spec.ns_dtype == "bfloat16" else torch.float32,
        layout=layout,
    )
    return MuonAndAdamW([muon, AdamW(groups[1:], lr=spec.lr, **adamw_options(spec))])


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


class MuonAndAdamW(Optimizer):
    """Several optimizers of different parameters as one: their groups, one state."""

    def __init__(self, optimizers: list[Optimizer]):
        super().__init__([g for o in optimizers for g in o.param_groups], {})
        self.optimizers = optimizers
        self._share()

    def _share(self) -> None:
        """Let each have its own groups of these, and all the one state."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            own = list(islice(groups, len(optimizer.param_groups)))
            optimizer.param_groups, optimizer.state = own, self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what was loaded is theirs."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Of each, one after the other."""
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
