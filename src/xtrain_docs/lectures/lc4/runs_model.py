"""Functions that run on every rank for the pages on the whole model and its files."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm import autograd as comm_autograd
from xtrain.comm.collective_choice import RING, Collectives
from xtrain.comm.work import Work
from xtrain.model import XtrainConfig, XtrainModel, hf_load, load_hf, save_hf
from xtrain.model.hf_files import FILE
from xtrain.model.hf_names import hf_name
from xtrain.tensor_parallel import cross_entropy, functions

BATCH, ITEMSIZE = 3, 8  # float64
ITEMSIZE_OF_FILE = 4  # float32
HIDDEN, HEAD_DIM, VOCABULARY = 7, 2, 24


def sequence_of(ranks: int, sequence_parallel: bool) -> int:
    """Odd; where it is cut, an odd number of tokens a rank."""
    return 3 * ranks if sequence_parallel else 5


def config_of(key_heads: int) -> XtrainConfig:
    """Twelve query heads, so that 2, 3 and 4 ranks can share them."""
    return XtrainConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=12,
        num_key_value_heads=key_heads,
        head_dim=HEAD_DIM,
    )


# ------------------------------------------------------- what the parts of a model send


def traffic(sequence_parallel: bool, key_heads: int = 12) -> dict[str, Any]:
    """Calls, and elements sent, of each part of a model, forward and backward.

    All collectives are our ring, which sends what the formulas say and lets the ledger
    count it.
    """
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # ranks of a tensor group bring the same tokens
    config, sequence = config_of(key_heads), sequence_of(ranks, sequence_parallel)
    model = XtrainModel(
        config,
        init_mesh((ranks,), ("tensor",)),
        sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )
    tokens = torch.randint(VOCABULARY, (BATCH, sequence))
    positions = torch.arange(sequence)
    local = sequence // ranks if sequence_parallel else sequence
    x_BSH = torch.randn(BATCH, local, HIDDEN, dtype=torch.float64)
    columns = torch.randn(
        BATCH, sequence, VOCABULARY // ranks, dtype=torch.float64, requires_grad=True
    )
    return {
        "embedding": sent_by(lambda: model.embed_tokens(tokens)),
        "layer": sent_by(lambda x: model.layers[0](x, positions), x_BSH),
        "head": sent_by(lambda x: model.lm_head(model.norm(x)), x_BSH),
        "loss": sent_by(
            lambda: cross_entropy.vocab_parallel_cross_entropy(columns, tokens)
        ),
    }


def sent_by(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Any]:
    """One part's forward and backward, each with its calls and the elements it sent."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    found: dict[str, Any] = {}
    with counted() as calls, CommLedger() as ledger:
        output = function(*leaves)
    found["forward"] = {"calls": calls, "sent": ledger.bytes_sent // ITEMSIZE}
    with counted() as calls, CommLedger() as ledger:
        output.backward(torch.ones_like(output))
    found["backward"] = {"calls": calls, "sent": ledger.bytes_sent // ITEMSIZE}
    return found


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Run all collectives as rings, and count the calls of each kind."""
    calls: dict[str, int] = {}

    def counting(name: str) -> Callable[..., Work]:
        def call(*args: Any, **kwargs: Any) -> Work:
            calls[name] = calls.get(name, 0) + 1
            return getattr(RING, name)(*args, **kwargs)

        return call

    names = ("all_reduce", "all_gather", "reduce_scatter")
    ring = Collectives("ring", *map(counting, names), RING.all_to_all_single)
    torch_like = SimpleNamespace(all_reduce=ring.all_reduce, ReduceOp=dist.ReduceOp)
    with (
        mock.patch.object(functions, "TORCH", ring),
        mock.patch.object(comm_autograd, "TORCH", ring),
        mock.patch.object(comm_autograd, "default_collectives", return_value=ring),
        mock.patch.object(cross_entropy, "dist", torch_like),
    ):
        yield calls


# --------------------------------------------------------- what a rank reads of a file


def file_config() -> XtrainConfig:
    """Small enough that a picture can show every byte: one layer, two key heads."""
    return XtrainConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
    )


def ranges_read() -> dict[str, Any]:
    """The boxes that `load_hf` asks of a file on this rank, and what the file holds."""
    mesh = init_mesh((dist.get_world_size(),), ("tensor",))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    directory = Path(folder[0])
    if dist.get_rank() == 0:
        save_hf(XtrainModel(file_config()), directory)
    dist.barrier()
    asked: list[list[Any]] = []
    read_box = hf_load.read_box

    def watching(opened: Any, name: str, box: Any) -> Tensor:
        asked.append([name, list(box.offset), list(box.end)])
        return read_box(opened, name, box)

    with mock.patch.object(hf_load, "read_box", watching):
        model = load_hf(directory, mesh)
    dist.barrier()
    return {
        "asked": asked,
        "held": sum(parameter.nbytes for parameter in model.parameters()),
        "file": (directory / FILE).stat().st_size,
        "shapes": full_shapes(model),
    }


def full_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Each tensor of the checkpoint with its whole shape."""
    return {
        hf_name(name): model.placement(name).full_shape(parameter)
        for name, parameter in model.named_parameters()
    }


# --------------------------------------------------------------- which slice a rank has


def slices_held() -> dict[str, list[int]]:
    """Per parameter its shape, and the range of one dim that this rank holds."""
    model = XtrainModel(file_config(), init_mesh((dist.get_world_size(),), ("tensor",)))
    found = {}
    for name, parameter in model.named_parameters():
        place = model.placement(name)
        first = place.index * parameter.shape[place.dim]
        end = first + parameter.shape[place.dim]
        found[name] = [*place.full_shape(parameter), place.dim, first, end]
    return found
