"""Attention as trials: who computes something else is not timed; blocks that sleep."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from tests.bench.contestants import wrong_beside
from tests.bench.test_runner import SHORT
from xtrain.bench import Case, RaceError, attention_trials
from xtrain.bench.attention_trials import (
    TOLERANCE,
    cut_trial,
    in_float64,
    one_process_trial,
    sdpa,
)
from xtrain.bench.races import lc6
from xtrain.bench.runner import run_measurement
from xtrain.context_parallel import ring_attention
from xtrain.context_parallel.block_attention import FUSED_CPU

SIZE = 32 * attention_trials.TOKEN_BYTES
TRIAL = "xtrain.bench.attention_trials:cut_trial"


def local_only(q, k, v, group=None):
    """Every rank attends to its own tokens, and to no others."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class LostGradient(torch.autograd.Function):
    """The identity, whose gradient is nothing on rank 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (dist.get_rank() != 1)


def values_without_gradient(q, k, v, group=None):
    """The output is right, dV of one rank is not."""
    return ring_attention(q, k, LostGradient.apply(v), group=group)


def as_if_balanced(q, k, v, group=None):
    """The tokens lie in runs, but are taken for zigzag."""
    return ring_attention(q, k, v, balance="zigzag", group=group)


@pytest.mark.verifies(TRIAL, "xtrain.bench.attention_trials:one_process_trial")
@pytest.mark.parametrize(
    ("wrong", "output"),
    [(local_only, 0), (values_without_gradient, 3), (as_if_balanced, 0)],
)
def test_attention_with_a_wrong_output_or_gradient_is_not_timed(world, wrong, output):
    race = wrong_beside(
        partial(one_process_trial, partial(sdpa, causal=True)),
        partial(cut_trial, wrong, "none", "gloo"),
        SIZE,
        reference=partial(in_float64, True),
        tolerance=TOLERANCE,
    )
    with pytest.raises(RaceError) as caught:
        run_measurement(world(2), race, SIZE, SHORT)
    for rank in range(2):
        assert f"rank {rank} output {output} differs" in str(caught.value.__cause__)


def who_computes(case):
    """Whether a call does anything on this rank, and what is left to compare."""
    trial = one_process_trial(partial(sdpa, causal=True), case)
    return trial.call() is not None, [list(t.shape) for t in trial.outputs]


def test_one_process_is_rank_0_and_all_ranks_compare_the_whole_sequence(world):
    shape = [1, attention_trials.HEADS, 32, attention_trials.HEAD_DIM]
    found = world(2).run(who_computes, Case(SIZE, 2))
    assert found == [(True, [shape] * 4), (False, [shape] * 4)]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_sleep_sleep_by_pairs_and_compute_the_same(monkeypatch, causal):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    q, k, v, grad = torch.randn(4, 1, 2, 6, 8)
    out, lse = lc6.SLEEPING.forward(q, k, v, causal, 0.5)
    right = FUSED_CPU.forward(q, k, v, causal, 0.5)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    arguments = grad, q, k, v, out, lse, causal, 0.5
    found = lc6.SLEEPING.backward(*arguments)
    for gradient, wanted in zip(found, FUSED_CPU.backward(*arguments), strict=True):
        assert torch.equal(gradient, wanted)
    assert slept == [(21 if causal else 36) * lc6.PAIR] * 2


def torchs_own(causal):
    """What torch's context manager says on this rank."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("context",))
    q, k, v = torch.randn(3, 1, 4, 32, 16)
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    except NotImplementedError as error:
        return str(error)
    return "it runs"


def test_torchs_context_parallel_has_no_rule_for_the_kernel_of_the_cpu(world):
    for said in world(2).run(torchs_own, True):
        assert "_scaled_dot_product_flash_attention_for_cpu" in said
        assert "does not have a sharding strategy" in said
