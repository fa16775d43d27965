"""torch's own DDP, FSDP2, tensor parallel, pipelining and checkpoints, unchanged."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.backends.conftest import and_under_nccl_rules
from xtrain.testing import World

# What the tests here prove, for their marks.
STACK = (
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.shared_memory:SharedMemory",
    "xtrain.backends.socket_calls:SocketCalls",
    "xtrain.backends.sockets:Sockets",
    "xtrain.backends.call_runner:CallRunner",
)

DIM, HEADS, VOCAB, LENGTH, BATCH = 16, 4, 31, 12, 8


class Block(nn.Module):
    """Attention and a two-layer MLP, each on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], 3, HEADS, DIM // HEADS)
        q, k, v = self.qkv(self.norm_1(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def transformer(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Block() for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(VOCAB, DIM), *layers, nn.Linear(DIM, VOCAB))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    # Contiguous, because torch 2.11 compares the strides of a pipeline's inputs.
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mine(part: Tensor) -> Tensor:
    return part.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, share, steps: int = 4) -> list[float]:
    """Losses over the whole batch of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        loss = loss_of(model(share(tokens)), share(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(
            total, dist.ReduceOp.AVG if share is mine else dist.ReduceOp.MAX
        )
        losses.append(total.item())
    return losses


def with_ddp() -> list[float]:
    return train(DistributedDataParallel(transformer(), bucket_cap_mb=0.01), mine)


def with_fsdp() -> list[float]:
    model = transformer()
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer)
    return train(fully_shard(model), mine)


def with_tensor_parallel() -> list[float]:
    model, mesh = transformer(), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model:
        if isinstance(layer, Block):
            parallelize_module(layer, mesh, plan)
    return train(model, lambda whole: whole)


def with_pipeline() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(transformer(size))
    own = layers[1 + rank]
    first, last = rank == 0, rank == size - 1
    module = nn.Sequential(*layers[:1] * first, own, *layers[-1:] * last)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    all_losses = []
    for step in range(4):
        tokens, targets = batch(step)
        losses: list[Tensor] = []
        inputs = (tokens,) if first else ()
        schedule.step(*inputs, target=targets if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if last else torch.empty(())
        dist.broadcast(mean, size - 1)
        all_losses.append(mean.item())
    return all_losses


def alone(blocks: int) -> list[float]:
    model = transformer(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        tokens, targets = batch(step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def on_gloo():
    """The same training on gloo, once for each kind and size."""
    known = {}
    made: dict[int, World] = {}

    def get(kind, size: int) -> list[float]:
        if (kind, size) not in known:
            made.setdefault(size, World(size))
            known[kind, size] = made[size].run(kind, timeout=60)[0]
        return known[kind, size]

    yield get
    for one in made.values():
        one.close()


KINDS = [with_ddp, with_fsdp, with_tensor_parallel, with_pipeline]


@pytest.mark.verifies(*STACK)
@and_under_nccl_rules
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_transformer_trains_as_on_gloo(ours, on_gloo, kind, size):
    by_rank = ours(size).run(kind, timeout=60)
    assert all(losses == by_rank[0] for losses in by_rank)
    losses = torch.tensor(by_rank[0])
    torch.testing.assert_close(losses, torch.tensor(on_gloo(kind, size)))
    reference = alone(size if kind is with_pipeline else 2)
    torch.testing.assert_close(losses, torch.tensor(reference), rtol=1e-4, atol=1e-5)


def save_and_load(folder: str) -> None:
    model = fully_shard(transformer())
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), before[name])


@and_under_nccl_rules
@pytest.mark.verifies(*STACK)
def test_distributed_checkpoints(ours, tmp_path):
    ours(2).run(save_and_load, str(tmp_path), timeout=60)
