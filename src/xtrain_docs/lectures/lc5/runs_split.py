"""Runs for the page on the split backward: matmuls by part, and what is kept."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.model.parts import CutParts, WholeParts
from xtrain.pipeline_parallel import split_backward
from xtrain.testing.saved import SavedTensors

BATCH, SEQUENCE = 2, 48
CONFIG = XtrainConfig(
    vocab_size=8,
    hidden_size=32,
    intermediate_size=88,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MATMULS = (
    torch.ops.aten.mm,
    torch.ops.aten.bmm,
    torch.ops.aten.addmm,
    torch.ops.aten.addmm_,
)


def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Causal attention, as the two matmuls that it is."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


class Layer(nn.Module):
    """A decoder layer as a stage, of plain or of tensor-parallel linear layers."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        parts = WholeParts(CONFIG, attention)
        if kind == "tensor-parallel":
            group = torch.distributed.group.WORLD
            assert group is not None
            parts = CutParts(CONFIG, attention, False, group)
        self.layer = DecoderLayer(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.arange(SEQUENCE))


def stage_and_input(kind: str) -> tuple[Layer, Tensor]:
    stage = Layer(kind)
    x = torch.randn(BATCH, SEQUENCE, CONFIG.hidden_size)
    return stage, x.requires_grad_()


class Matmuls(TorchDispatchMode):
    """The matmuls inside: FLOPs of each, and the weight that it reads, if any."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.found: list[list[Any]] = []
        self._names = {
            p.data_ptr(): name.split(".")[-2] for name, p in stage.named_parameters()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in MATMULS:
            a, b = args[-2:]
            read = [self._names.get(t.data_ptr()) for t in (a, b)]
            name = next((n for n in read if n), "attention" if a.dim() == 3 else None)
            self.found.append([name, 2 * a.numel() * b.shape[-1]])
        return result


def matmuls_by_part() -> dict[str, list[list[Any]]]:
    """[whose, FLOPs] of every matmul of a decoder layer in F, B and W, in order."""
    stage, x = stage_and_input("plain")
    done: list[str] = []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: done.append(name.split(".")[-2])
        )
    with Matmuls(stage) as in_f, split_backward() as split:
        y = stage(x)
    with Matmuls(stage) as in_b:
        split.backward_input(y, torch.ones_like(y))
    done.clear()
    with Matmuls(stage) as in_w:
        split.backward_weight()
    pairs = zip(done, in_w.found, strict=True)  # a weight's gradient, then its hook
    return {
        "F": in_f.found,
        "B": in_b.found,
        "W": [[name, flops] for name, (_, flops) in pairs],
    }


def bytes_kept() -> dict[str, int]:
    """Of activations: what autograd keeps after F, and what is kept after B."""
    stage, x = stage_and_input("plain")
    with SavedTensors() as saved, split_backward() as split:
        y = stage(x)
    split.backward_input(y, torch.ones_like(y))
    after_b = split.kept_bytes
    split.backward_weight()
    return {
        "F": saved.nbytes(but=stage.parameters()),
        "B": after_b,
        "W": split.kept_bytes,
    }


def count(call: Callable[[], Any], stage: nn.Module) -> int:
    with Matmuls(stage) as matmuls:
        call()
    return len(matmuls.found)


def matmuls_counted(kind: str) -> dict[str, int]:
    """Of one backward: in one piece, split by torch's walk of the graph, and by us."""
    stage, x = stage_and_input(kind)
    y = stage(x)
    gradient = torch.ones_like(y)
    found = {"one piece": count(lambda: y.backward(gradient), stage)}
    expected = [p.grad for p in stage.parameters()]

    stage.zero_grad(), setattr(x, "grad", None)
    y, groups = stage(x), []

    def walk() -> None:
        _, more = stage_backward_input([y], [gradient], [x], stage.parameters())
        groups.extend(more)

    found["torch B"] = count(walk, stage)
    found["torch W"] = count(
        lambda: stage_backward_weight(stage.parameters(), groups), stage
    )
    check(stage.parameters(), expected)

    stage.zero_grad()
    with split_backward() as split:
        y = stage(x)
    found["B"] = count(lambda: split.backward_input(y, gradient), stage)
    found["W"] = count(split.backward_weight, stage)
    check(stage.parameters(), expected)
    return found


def check(parameters: Iterable[nn.Parameter], expected: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
