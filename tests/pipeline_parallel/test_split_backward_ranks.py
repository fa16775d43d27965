"""Backward in two parts on several ranks: tensor parallelism, and every wrapper."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import device_type
from tests.model.twins import batch, config_of
from tests.pipeline_parallel.split_stages import Matmuls
from tests.tensor_parallel.dense import close, fill, our_collectives, random_of
from tests.training import batch_of, make_model
from tests.zero.test_interleaved import compare
from xtrain.comm import CommLedger, init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel
from xtrain.pipeline_parallel import split_backward
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelSwiGLU,
    RowParallelLinear,
)
from xtrain.zero import FullyShardedDataParallel

SEQUENCE = {"sequence_parallel": True}
RING = {"sequence_parallel": True, "overlap": "ring"}
LAYERS = {
    "column": (ColumnParallelLinear, {}),
    "column, no bias": (ColumnParallelLinear, {"bias": False}),
    "column, no overlap": (ColumnParallelLinear, {"overlap": False}),
    "column, sequence": (ColumnParallelLinear, SEQUENCE),
    "column, ring": (ColumnParallelLinear, RING),
    "row": (RowParallelLinear, {}),
    "row, sequence": (RowParallelLinear, SEQUENCE),
    "row, ring": (RowParallelLinear, RING),
    "swiglu": (ParallelSwiGLU, {}),
    "swiglu, ring": (ParallelSwiGLU, RING),
}


def all_layers(dtype=None) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for name, (kind, options) in LAYERS.items():
        torch.manual_seed(0)
        layer = kind(2 * size, 3 * size, **options)
        layer = layer.double() if dtype is None else layer
        rows = (2, size, 2) if name.startswith("row") else (2, 3, 2 * size)
        x = random_of(7 + rank, *rows).to(layer_dtype(layer)).requires_grad_()
        check_layer(name, layer, x, dtype)


def layer_dtype(layer) -> torch.dtype:
    return next(layer.parameters()).dtype


def check_layer(name, layer, x, dtype) -> None:
    """Bit for bit; what is not in the queue has its gradient before."""

    def forward():
        with torch.autocast(device_type(), dtype, enabled=dtype is not None):
            return layer(x)

    y = forward()
    gradient = random_of(9, *y.shape).to(y.dtype)
    with Matmuls() as in_plain:
        y.backward(gradient)
    expected = {n: p.grad for n, p in [("x", x), *layer.named_parameters()]}
    layer.zero_grad()
    x.grad = None
    with split_backward() as split:
        y = forward()
    with Matmuls() as in_input:
        split.backward_input(y, gradient)
    late = {n for n, p in layer.named_parameters() if p.grad is None}
    assert late == {n for n, _ in layer.named_parameters() if "weight" in n}, name
    with Matmuls() as in_weight:
        split.backward_weight()
    assert in_input.count == in_weight.count == in_plain.count / 2 > 0, name
    for n, parameter in [("x", x), *layer.named_parameters()]:
        assert torch.equal(parameter.grad, expected[n]), f"{name}: {n}"


@pytest.mark.verifies(
    "xtrain.comm.deferred:deferral",
    "xtrain.comm.deferred:Deferral",
    "xtrain.tensor_parallel.functions:_ColumnLinear",
    "xtrain.tensor_parallel.functions:_RowLinear",
    "xtrain.tensor_parallel.functions:_column_weight_gradients",
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensor_parallel_layers_leave_the_same_gradients_to_the_last_bit(world, size):
    world(size).run(all_layers)


def test_so_they_do_under_autocast(world):
    world(2).run(all_layers, torch.bfloat16)


@our_collectives()
def gathers_of_a_column() -> None:
    size = dist.get_world_size()
    layer = ColumnParallelLinear(4, 2 * size, sequence_parallel=True)
    x = torch.ones(1, 3, 4, requires_grad=True)
    with split_backward() as split:
        y = layer(x)
    with CommLedger() as in_input:
        split.backward_input(y, torch.ones_like(y))
    assert sent(in_input) == x.nbytes  # the sum of dX alone: half of all tokens
    assert split.kept_bytes == x.nbytes + y.nbytes
    with CommLedger() as in_weight:
        split.backward_weight()
    assert sent(in_weight) == x.nbytes


def sent(ledger: CommLedger) -> int:
    return sum(event.nbytes for event in ledger.events if event.op == "send")


def test_a_slice_of_the_sequence_waits_as_a_slice_and_is_gathered_in_w(world):
    world(2).run(gathers_of_a_column)


def whole_models(changes, sequence_parallel: bool) -> None:
    mesh = init_mesh((dist.get_world_size(),), ("tensor",))
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    model = XtrainModel(config_of(**changes), mesh, **options)
    for step in range(2):
        batches = [batch(2 * step + n) for n in range(2)]
        for tokens, labels in batches:
            model.loss(tokens, labels).backward()
        expected = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        splits = []
        for tokens, labels in batches:
            with split_backward() as split:
                splits.append((split, model.loss(tokens, labels)))
        for split, loss in splits:
            split.backward_input(loss)
        waits = [n for n, p in model.named_parameters() if p.grad is None]
        assert sum("proj" in n for n in waits) >= 4 * len(model.layers)
        for split, _ in reversed(splits):
            split.backward_weight()
        for name, parameter in model.named_parameters():
            close(parameter.grad, expected[name], name)
        model.zero_grad()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"tie_word_embeddings": True}),
        (2, {"tie_word_embeddings": True}),
        (2, {"num_key_value_heads": 1}),
    ],
)
def test_a_whole_model_on_tensor_ranks_has_the_gradients_of_plain_backwards(
    world, size, changes, sequence_parallel
):
    world(size).run(whole_models, changes, sequence_parallel)


ORDERS = (
    "F0 F1 B0 B1 W1 W0",
    "F0 B0 W0 F1 F2 B1 W1 B2 W2",
    "F0 F1 B0 F2 B1 B2 W0 W1 W2",
)


def run_split(wrapped, order, step, reduced) -> dict:
    """Forwards and both parts of backwards in this order; the outputs."""
    rank, outputs, splits = dist.get_rank(), {}, {}
    with wrapped.reducer.no_sync():
        for action in order.split():
            kind, micro = action[0], int(action[1])
            if kind == "F":
                with split_backward() as splits[micro]:
                    outputs[micro] = wrapped.model(batch_of(step, micro, rank))
                continue
            if kind == "B":
                splits[micro].backward_input(outputs[micro].square().sum())
                assert splits[micro].kept_bytes > 0
            else:
                splits[micro].backward_weight()
                assert splits[micro].kept_bytes == 0
    wrapped.reducer.reduce_gradients()
    return outputs


WRAPPERS = (
    ("ddp", {}, {}),
    ("zero 1", {}, {}),
    ("zero 2", {}, {}),
    ("fsdp", {}, {}),
    ("fsdp", {"frozen": True}, {"reshard_after_forward": False}),
    ("fsdp", {"recompute": True}, {}),
    ("ddp", {"recompute": True, "frozen": True}, {}),
)


def all_wrappers() -> None:
    for kind, of_net, of_wrapper in WRAPPERS:
        compare(kind, "", of_net, of_wrapper, orders=ORDERS, run=run_split)


@pytest.mark.verifies("xtrain.zero.flat_param_group:Unshard")
@pytest.mark.parametrize("size", [1, 2])
def test_wrappers_reduce_what_both_parts_have_left(world, size):
    """Interleaved micro-batches inside no_sync, then one reduction: as one process."""
    world(size).run(all_wrappers, timeout=300)


class Chain(nn.Module):
    """Units of which every gradient waits for W."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def fully_sharded_chain() -> None:
    model, x = fill(Chain()), random_of(5, 4, 6)
    sharded, whole = FullyShardedDataParallel(deepcopy(model)), []
    groups = [group for unit in sharded.units for group in unit.flat_groups]

    def count(_) -> None:
        whole.append(sum(g.full.untyped_storage().nbytes() > 0 for g in groups))

    for step in range(2):
        model(x + step).square().sum().backward()
        with sharded.no_sync():
            leaf = (x + step).requires_grad_()
            leaf.register_hook(count)
            with split_backward() as split:
                y = sharded(leaf)
            split.backward_input(y.square().sum())
            split.backward_weight()
        sharded.reduce_gradients()
        for one in (model, sharded):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
    assert len(groups) == 4 and max(whole) <= 1
    weights = sharded.full_state_dict()
    for name, parameter in model.named_parameters():
        close(weights[name], parameter.detach(), name)


@pytest.mark.verifies("xtrain.comm.deferred:without_graph")
def test_a_fully_sharded_unit_is_freed_when_its_b_is_over(world):
    world(2).run(fully_sharded_chain)


def refused_by_ddp() -> None:
    model = DistributedDataParallel(make_model(0))
    with split_backward() as split:
        y = model(batch_of(0, 0, 0))
    with pytest.raises(
        RuntimeError, match="got no gradient in this backward: .*q_proj"
    ):
        split.backward_input(y.sum())


def test_outside_of_no_sync_data_parallelism_says_what_is_missing(world):
    world(2).run(refused_by_ddp)
