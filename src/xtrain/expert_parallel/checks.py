"""What a layer cut over ranks refuses, on every rank, before anything is sent."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import problem_of
from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.call_agreement import check_same_call
from xtrain.expert_parallel.moe import MoE
from xtrain.expert_parallel.router import check_tokens


def check_experts_call(
    name: str, x: Tensor, mask: Tensor | None, layer: MoE, group: ProcessGroup | None
) -> None:
    """ValueError on every rank unless all call alike, with tokens of one size."""
    problem = problem_of(lambda: check_batch(x, mask, layer))
    router, placement = layer.router, getattr(layer, "placement", None)
    arguments = {
        "hidden size": layer.experts.hidden_size,
        "experts": router.num_experts,
        "top_k": router.top_k,
        "once a rank": getattr(layer, "once_a_rank", False),
        "placement": placement and placement.experts,
        "dtype": "none" if problem else str(computed_in(x)),
        "gradient of tokens": torch.is_grad_enabled()
        and not problem
        and x.requires_grad,
        "gradient of experts": torch.is_grad_enabled()
        and any(weight.requires_grad for weight in layer.experts.parameters()),
    }
    check_same_call(name, [group], arguments, problem)


def check_batch(x: Tensor, mask: Tensor | None, layer: MoE) -> None:
    """ValueError unless these tokens and this mask fit the layer."""
    for what, given in {"tokens": x, "mask": mask}.items():
        if not isinstance(given, Tensor) and (given is not None or what == "tokens"):
            raise ValueError(f"{what}: {type(given).__name__} is not a tensor")
    if x.dim() < 2:
        raise ValueError(f"tokens of shape {list(x.shape)}: needs [..., hidden size]")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(
            f"mask of shape {list(mask.shape)} for tokens of shape {list(x.shape)}"
        )
    x_TH = x.flatten(0, -2)
    mask_T = None if mask is None else mask.flatten()
    check_tokens(x_TH, layer.router.hidden_size, mask_T)
    tokens, experts = computed_in(x), computed_in(next(layer.experts.parameters()))
    if tokens != experts:  # which a rank without rows would not notice
        raise ValueError(f"tokens are {tokens} and the experts {experts}")


def computed_in(tensor: Tensor) -> torch.dtype:
    """Its dtype, after autocast's cast if that is on."""
    return cast_by_autocast(tensor.detach()[:0])[0].dtype
