"""Recompute under wrappers that hook gradients, and around layers that communicate."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import randn
from tests.training import Model, adamw, batch_of, largest_difference, loss_of
from tests.training import reference as one_process
from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import checkpoint
from xtrain.tensor_parallel import ParallelDropout, ParallelSwiGLU
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

LIBRARY = "xtrain.pipeline_parallel.recompute:checkpoint"
STEPS = 4


class Recomputed(Model):
    """Every layer once more, and the head, whose weight is the embedding's."""

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, positions=positions)
        return checkpoint(lambda h: self.lm_head(self.norm(h)), hidden) * self.scale


class InSegments(Model):
    """All layers in one call, with one of their own around each."""

    def forward(self, tokens):
        def run(hidden, positions):
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, positions)
            return hidden

        positions = torch.arange(tokens.shape[1])
        hidden = checkpoint(run, self.embed_tokens(tokens), positions)
        return self.lm_head(self.norm(hidden)) * self.scale


def wrapped(kind, model):
    """The wrapped model and its optimizer."""
    if kind == "torch":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, adamw(ddp.parameters())
    if kind == "ddp":
        # buckets so small that gradients leave while others are still to come
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        return ddp, adamw(ddp.parameters())
    if kind == "zero":
        options = {"lr": 0.02, "weight_decay": 0.1, "stage": 2}
        return model, ZeroOptimizer(model.parameters(), AdamW, **options)
    kept = kind == "fsdp kept"
    fsdp = FullyShardedDataParallel(model, reshard_after_forward=not kept)
    return fsdp, adamw(fsdp.parameters())


def weights_after_training(cases, seed):
    """By case: the largest difference of this rank's weights from one process's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected, found = one_process(size, STEPS), {}
    for kind, model_class in cases:
        # ZeroOptimizer has no buffers, so there all ranks begin alike
        bare = model_class(seed if rank and kind != "zero" else 0).double()
        model, optimizer = wrapped(kind, bare)
        for step in range(STEPS):
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind.startswith("fsdp"):
            state = model.full_state_dict()
        else:
            state = dict(bare.state_dict())
        found[kind, model_class.__name__] = largest_difference(state, expected)
    return found


KINDS = ["torch", "ddp", "zero", "fsdp", "fsdp kept"]


@pytest.mark.verifies(LIBRARY)
@pytest.mark.world_sizes(1, 2, 3)
def test_wrapped_models_train_as_one_process_without_recompute(world, world_size):
    cases = [(kind, model) for kind in KINDS for model in (Recomputed, InSegments)]
    for found in world(world_size).run(weights_after_training, cases, 5):
        assert len(found) == len(cases)
        assert max(found.values()) < 1e-10, found


def around_communication():
    """Gradients of a tensor-parallel block with dropout, and what was sent for them."""
    rank, found = dist.get_rank(), []
    for recompute in (lambda function, x: function(x), checkpoint):
        torch.manual_seed(0)
        mlp = ParallelSwiGLU(6, 4 * dist.get_world_size()).double()
        for parameter in mlp.parameters():
            generator = torch.Generator().manual_seed(rank)
            parameter.data.copy_(randn(*parameter.shape, generator=generator))
        block = nn.Sequential(mlp, ParallelDropout(0.3), mlp)
        x = torch.ones(2, 3, 6, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(9)
        with CommLedger() as forward:
            y = recompute(block, x * 1)
        with CommLedger() as backward:
            y.square().sum().backward()
        gradients = [x.grad, *(p.grad for p in mlp.parameters())]
        found.append(([y.detach(), *gradients], forward, backward))
    (plain, ahead, back), (mine, forward, backward) = found
    for a, b in zip(plain, mine, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert calls(forward) == calls(ahead)
    assert calls(backward) == calls(ahead) + calls(back)
    return len(calls(ahead))


def calls(ledger):
    return [(event.op, event.peer, event.payload) for event in ledger.events]


@pytest.mark.verifies(LIBRARY)
@pytest.mark.world_sizes(2, 3)
def test_the_second_run_sends_what_forward_sent(world, world_size):
    assert set(world(world_size).run(around_communication)) == {2}
