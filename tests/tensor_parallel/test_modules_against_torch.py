"""What torch.distributed.tensor.parallel does where our modules do otherwise."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.tensor_parallel.dense import fill
from xtrain.comm import CommLedger
from xtrain.model import XtrainConfig
from xtrain.model.layer import SwiGLU

WHOLE = {"input_layouts": Replicate(), "output_layouts": Replicate()}


@pytest.fixture
def ranks(world):
    """Four ranks over gloo, whose calls torch's modules make by themselves."""
    if world(2).backend not in ("gloo", "xtrain-virtual"):
        pytest.skip("torch's own modules are looked at over gloo")
    return world(4)


def calls(module: nn.Module, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """Names of the collectives of forward and backward."""
    with CommLedger() as forward:
        y = module(x)
    with CommLedger() as backward:
        (y.to_local() if isinstance(y, DTensor) else y).sum().backward()
    return [e.op for e in forward.events], [e.op for e in backward.events]


def swiglu_of_torch(together: bool) -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = XtrainConfig(
        vocab_size=1,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    block = fill(SwiGLU(config))
    plan = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    parallelize_module(block, mesh, plan)
    if together:
        whole = (Replicate(),)
        prepared = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        parallelize_module(block, mesh, prepared)
    return calls(block, torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True))


def test_torch_sums_the_inputs_gradient_once_only_if_the_block_prepares_it(ranks):
    apart, together = (ranks.run(swiglu_of_torch, choice)[0] for choice in (0, 1))
    assert apart == (["all_reduce"], ["all_reduce", "all_reduce"])
    assert together == (["all_reduce"], ["all_reduce"])


def keys_of_torch() -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one_head = nn.Linear(8, 4, bias=False)
    parallelize_module(one_head, mesh, ColwiseParallel())
    return list(one_head.weight.to_local().shape)


def test_torch_cuts_a_key_head_into_pieces_where_there_are_too_few(ranks):
    assert ranks.run(keys_of_torch) == [[1, 8]] * 4


def embeddings_of_torch() -> tuple:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.arange(12).view(1, 12)
    found = []
    for style in (RowwiseParallel, ColwiseParallel):
        layer = nn.Embedding(12, 8)
        parallelize_module(layer, mesh, style(**WHOLE))
        found.append(calls(layer, ids))
    layer = nn.Embedding(12, 8)
    parallelize_module(layer, mesh, RowwiseParallel(**WHOLE))
    outside = layer(torch.tensor([[12]]))
    odd = nn.Embedding(13, 8)
    parallelize_module(odd, mesh, RowwiseParallel(**WHOLE))
    return *found, list(outside.shape), len(odd.weight.to_local())


def test_torchs_embeddings_send_the_same_and_take_ids_outside_the_vocabulary(ranks):
    found = ranks.run(embeddings_of_torch)
    for by_rows, by_columns, outside, _ in found:
        assert by_rows == (["all_reduce"], [])
        assert by_columns == (["all_gather_into_tensor"], [])
        assert outside == [1, 1, 8]
    assert [rows for *_, rows in found] == [4, 4, 4, 1]


def norm_of_torch() -> tuple[list[str], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norm = nn.RMSNorm(8)
    parallelize_module(norm, mesh, SequenceParallel())
    sent = calls(norm, torch.ones(1, 2, 8, requires_grad=True))
    return sent[0] + sent[1], norm.weight.grad.placements[0].is_partial("sum")


def test_torch_leaves_the_gradient_of_a_norm_on_slices_as_parts_of_a_sum(ranks):
    assert ranks.run(norm_of_torch) == [([], True)] * 4


def loss_of_torch() -> tuple[float, float, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole, labels = 60 * torch.randn(6, 32), torch.arange(6)
    local = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    logits = DTensor.from_local(local, mesh, [Shard(-1)])
    with loss_parallel():
        loss = F.cross_entropy(logits, labels).full_tensor().item()
        try:
            F.cross_entropy(logits, labels, label_smoothing=0.1)
            refused = ""
        except RuntimeError as problem:
            refused = str(problem)
    return loss, F.cross_entropy(whole, labels).item(), refused


@pytest.mark.processes("loss_parallel changes torch's operators for a whole process")
def test_torchs_loss_takes_large_logits_and_no_label_smoothing(ranks):
    for loss, right, refused in ranks.run(loss_of_torch):
        assert loss == pytest.approx(right, rel=1e-6)
        assert "mixed torch.Tensor and DTensor" in refused
