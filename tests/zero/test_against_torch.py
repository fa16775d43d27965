"""What the pages of lc3 say about torch's own classes."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xtrain.comm import CommLedger
from xtrain.zero import FullyShardedDataParallel


@pytest.fixture(autouse=True)
def on_cpu(xtrain_worlds):
    """Skip elsewhere: torch's classes are looked at on CPUs, over any backend."""
    if xtrain_worlds.device != "cpu":
        pytest.skip("what torch's classes do is looked at on CPUs")


def step_of_torchs_stage_1():
    """Elements stepped here; all-reduced and broadcast elements of a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and used
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    bare = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    model = DistributedDataParallel(bare)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False
    )
    with CommLedger() as ledger:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    mine = optimizer.optim.param_groups[0]["params"]
    reduced, sent = (
        sum(e.payload for e in ledger.events if kind in e.op) // 4
        for kind in ("reduce", "broadcast")
    )
    return sum(p.numel() for p in mine), reduced, sent


def clipped_by_torch():
    """The norm that torch's function returns, and what it makes of the gradient.

    Of a bare layer, of FSDP2's, and of the flat shards of ours. All have the same data.
    """
    from torch.distributed.fsdp import fully_shard

    found = []
    for wrap in (nn.Sequential, fully_shard, FullyShardedDataParallel):
        torch.manual_seed(0)
        model = wrap(nn.Linear(4, 4, bias=False))
        model(torch.ones(2, 4)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        (parameter,) = model.parameters()
        both = (norm, parameter.grad)
        found.append([getattr(t, "full_tensor", lambda t=t: t)() for t in both])
    return found


def test_torchs_clipping_knows_the_shards_of_fsdp2_and_not_flat_ones(world):
    for bare, fsdp2, ours in world(2).run(clipped_by_torch):
        assert bare[0] > 1
        torch.testing.assert_close(fsdp2, bare)
        assert ours[0] < 0.99 * bare[0]  # of this rank's half alone


def test_torchs_stage_1_all_reduces_and_then_broadcasts_whole_parameters(world):
    """Three matrices of 16 on two ranks: one steps two, the other one."""
    results = world(2).run(step_of_torchs_stage_1)
    assert sorted(stepped for stepped, *_ in results) == [16, 32]
    for _, reduced, sent in results:
        assert (reduced, sent) == (48, 48)
