"""Functions that run on every rank for the tables of lc4: operators, parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm import CommLedger, autograd, init_mesh
from xtrain.model import XtrainConfig, XtrainModel

from ...evidence import EvidenceError
from .runs_calls import calls, collectives_of
from .states import holds

OPERATORS = {
    "identity_all_reduce": ("replicated", "replicated", "partial", "replicated"),
    "all_reduce_identity": ("partial", "replicated", "replicated", "replicated"),
    "split_all_gather": ("replicated", "split 0", "split 0", "replicated"),
    "all_gather_split": ("split 0", "replicated", "replicated", "split 0"),
    "all_gather_reduce_scatter": ("split 0", "replicated", "partial", "split 0"),
    "reduce_scatter_all_gather": ("partial", "split 0", "split 0", "replicated"),
}
"""Functions of `comm.autograd`: input, output, gradient of the output, of the input."""


def operators() -> dict[str, dict[str, Any]]:
    """What each differentiable collective calls and sends, forward and backward."""
    return {name: operator(name) for name in OPERATORS}


def operator(name: str) -> dict[str, Any]:
    """The same of one; EvidenceError unless the states are those of OPERATORS."""
    with collectives_of("torch"):
        (forward, backward), _ = passed(name)
    called = {"forward": calls(forward), "backward": calls(backward)}
    (forward, backward), size = passed(name)
    kinds = {way: [kind for kind, _ in found] for way, found in called.items()}
    return kinds | {"sent": [forward.bytes_sent, backward.bytes_sent], "bytes": size}


def passed(name: str) -> tuple[tuple[CommLedger, CommLedger], int]:
    """The ledgers of a pass forward and back, and the bytes of the whole tensor."""
    before, after, arriving, leaving = OPERATORS[name]
    shape = (2 * dist.get_world_size(), 3)
    x, whole = tensor_that_is(before, 1, shape)
    grad, whole_grad = tensor_that_is(arriving, 2, shape)
    x.requires_grad_()
    arguments = () if name.endswith(("y_all_reduce", "e_identity")) else (0,)
    with CommLedger() as forward:
        y = getattr(autograd, name)(x, *arguments)
    with CommLedger() as backward:
        y.backward(grad)
    for state, mine, full in ((after, y, whole), (leaving, x.grad, whole_grad)):
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine.detach())
        if not holds(state, held, full):
            raise EvidenceError(f"{name}: a tensor is not {state}")
    return (forward, backward), whole.nbytes


def random_of(seed: int, *shape: int) -> Tensor:
    """Random numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tensor_that_is(
    state: str, seed: int, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """What this rank has of a dense tensor, and the dense tensor."""
    if state == "partial":
        parts = [random_of(seed + 10 * r, *shape) for r in range(dist.get_world_size())]
        return parts[dist.get_rank()].clone(), torch.stack(parts).sum(0)
    dense = random_of(seed, *shape)
    slices = dense.chunk(dist.get_world_size())
    return (slices[dist.get_rank()] if "split" in state else dense).clone(), dense


def parameters_held() -> dict[str, list[int]]:
    """Elements of each kind of parameter: of the full model, and on this rank."""
    config = XtrainConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    mesh = init_mesh((dist.get_world_size(),), ("tensor",))
    cut = XtrainModel(config, mesh)
    kinds: dict[str, list[int]] = {}
    for name, parameter in cut.named_parameters():
        layer = name.split(".")[-2]
        kind = "norms" if "norm" in layer else layer
        full = torch.Size(cut.placement(name).full_shape(parameter)).numel()
        held = kinds.setdefault(kind, [0, 0])
        held[0] += full
        held[1] += parameter.numel()
    return kinds
