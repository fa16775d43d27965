"""The training script of lecture 2 against one process, and against itself resumed."""

import pytest
import torch
from snippets.lc2 import train as script
from torch import nn

from xtrain.data_parallel import DistributedSampler

SAMPLES = 12  # of all ranks in a step
EPOCHS = 3


@pytest.fixture(autouse=True)
def on_cpu(xtrain_worlds):
    if xtrain_worlds.device != "cpu":
        pytest.skip("the script is for CPUs")


def run_script(epochs, file, size, micro_batch_size=2):
    losses, net = script.train(epochs, file, SAMPLES // size, micro_batch_size)
    return losses, {name: t.clone() for name, t in net.state_dict().items()}


def one_process(epochs, max_norm=0.5):
    """No wrapper, no sampler's ranks, no micro-batches: the same steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    sampler = DistributedSampler(script.SENTENCES, num_replicas=1, rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order, loss_sum, token_sum = list(sampler), 0.0, 0
        for first in range(0, len(order), SAMPLES):
            rows = script.SENTENCES[order[first : first + SAMPLES]]
            logits, labels = net(rows[:, :-1]), rows[:, 1:]
            taken = labels > 0
            loss = nn.functional.cross_entropy(logits[taken], labels[taken])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            loss_sum += loss.item() * int(taken.sum())
            token_sum += int(taken.sum())
        losses.append(loss_sum / token_sum)
    return losses, net.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_script_equals_one_process(world, tmp_path, size):
    """Every loss and every weight, whatever the ranks and micro-batches."""
    losses, weights = one_process(EPOCHS)
    assert one_process(EPOCHS, max_norm=1e9)[0] != losses  # clipping does something
    lengths = (script.SENTENCES > 0).sum(1)
    assert len(set(lengths.tolist())) > 3  # a mean of means would be another number
    results = world(size).run(run_script, EPOCHS, tmp_path / "model", size)
    for found, state in results:
        assert found == pytest.approx(losses, rel=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_script_continues_exactly(world, tmp_path, stop):
    """The same bits as without a stop; without the optimizer's state, others."""
    losses, weights = world(2).run(run_script, EPOCHS, tmp_path / "whole", 2)[0]
    file = tmp_path / "stopped"
    world(2).run(run_script, stop, file, 2)
    saved = torch.load(file)
    for found, state in world(2).run(run_script, EPOCHS, file, 2):
        assert found == losses
        assert all(torch.equal(state[name], weights[name]) for name in weights)
    kept, optimizer, done = saved
    torch.save((kept, {**optimizer, "state": {}}, done), file)
    forgetful, _ = world(2).run(run_script, EPOCHS, file, 2)[0]
    assert forgetful != losses
