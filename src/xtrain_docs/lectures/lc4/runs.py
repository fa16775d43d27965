"""Functions that run on every rank for the tables of lc4: calls, states, parameters."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm import CommLedger, autograd, init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .runs_dataflow import local
from .runs_dataflow_case import Case, random_of
from .runs_dataflow_match import state_of
from .runs_dataflow_modules import CASES
from .runs_dataflow_record import Recorder, recording
from .runs_dataflow_sent import by_rank
from .runs_dataflow_twins import BATCH, HIDDEN, SEQUENCE

OPERATORS = {
    "identity_all_reduce": ("replicated", "partial"),
    "all_reduce_identity": ("partial", "replicated"),
    "split_all_gather": ("replicated", "split"),
    "all_gather_split": ("split", "replicated"),
    "all_gather_reduce_scatter": ("split", "partial"),
    "reduce_scatter_all_gather": ("partial", "split"),
}
"""Functions of `comm.autograd`: what the input is, and the gradient of the output."""


def operators() -> dict[str, dict[str, Any]]:
    """What each differentiable collective does forward and backward."""
    return {name: operator(name) for name in OPERATORS}


def operator(name: str) -> dict[str, Any]:
    """What a differentiable collective does forward and backward.

    The states of its output and of its input's gradient are found out by numbers.
    """
    before, arriving = OPERATORS[name]
    shape = (2 * dist.get_world_size(), 3)
    x, dense = tensor_that_is(before, 1, shape)
    x.requires_grad_()
    recorder = Recorder(nn.Module())
    arguments = () if name.endswith(("y_all_reduce", "e_identity")) else (0,)
    with recording(recorder), CommLedger() as ledger:
        y = getattr(autograd, name)(x, *arguments)
        forward = ledger.bytes_sent
        recorder.begin_backward()
        grad, dense_grad = tensor_that_is(arriving, 2, shape)
        y.backward(grad)
    sent = [one for call, _ in recorder.rows if call for one in call.sent]
    return {
        "before": before,
        "after": state_of(by_rank(y.detach()) or [], dense),
        "arriving": arriving,
        "leaving": state_of(by_rank(x.grad) or [], dense_grad),
        "forward": [one.kind for one in sent],
        "backward": [one.kind for one in recorder.backward],
        "sent": [forward, ledger.bytes_sent - forward],
        "bytes": dense.nbytes,
    }


def tensor_that_is(
    state: str, seed: int, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """What this rank has of a dense tensor, and the dense tensor."""
    if state == "partial":
        parts = [random_of(seed + 10 * r, *shape) for r in range(dist.get_world_size())]
        return parts[dist.get_rank()].clone(), torch.stack(parts).sum(0)
    dense = random_of(seed, *shape)
    return local(dense, 0 if state == "split" else None).clone(), dense


def linear_modes() -> dict[str, Case]:
    """Column and row layers as they can be used, and the pair of them."""
    column, row = CASES["column_linear"], CASES["row_linear"]

    def made(layer: type, **options: Any) -> Any:
        return lambda whole: layer.from_full(whole, **options)

    gathered = made(ColumnParallelLinear, gather_output=True)
    sequence = made(ColumnParallelLinear, sequence_parallel=True)
    split = made(RowParallelLinear, split_input=True)
    scattered = made(RowParallelLinear, sequence_parallel=True)
    return {
        "column": column,
        "column, gather_output": replace(column, cut=gathered, output_dim=None),
        "column, sequence_parallel": replace(column, cut=sequence, input_dim=1),
        "row": row,
        "row, split_input": replace(row, cut=split, input_dim=None),
        "row, sequence_parallel": replace(row, cut=scattered, output_dim=1),
        "column, then row": CASES["swiglu"],
    }


def calls(name: str) -> dict[str, list[list[Any]]]:
    """The collectives of a module, forward and backward: kind and whole elements.

    Args:
        name: of `linear_modes`, or of the data-flow pictures.
    """
    case = (linear_modes() | CASES)[name]
    module = case.cut(case.dense())
    recorder = Recorder(nn.Module())
    x = local(case.input(), case.input_dim).requires_grad_()
    with recording(recorder):
        y = module(x, *case.others())
        recorder.begin_backward()
        y.backward(local(case.output_grad(), case.output_dim))
    forward = [one for call, _ in recorder.rows if call for one in call.sent]
    return {
        way: [[one.kind, max(one.before.numel(), one.after.numel())] for one in sent]
        for way, sent in (
            ("forward", [*forward, *recorder.stray]),
            ("backward", recorder.backward),
        )
    }


def tokens_and_hidden() -> tuple[int, int]:
    """Tokens of a batch in the modules above, and the hidden size."""
    return BATCH * SEQUENCE, HIDDEN


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
