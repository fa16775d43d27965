"""What a process has once, each rank has for itself, while they take turns."""

import os
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.cluster import VirtualCluster
from xtrain.comm import CommLedger, ring_all_reduce


def draws(seed: int) -> list[float]:
    """Numbers of every kind, with other ranks between each and the next."""
    dist.barrier()
    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    for _ in range(3):
        dist.barrier()
        found += [torch.rand(()).item(), random.random(), random.gauss(0, 1)]
        found += nn.functional.dropout(torch.ones(4), 0.5).tolist()
        found.append(random.Random(seed).random())
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.verifies("xtrain.cluster.per_rank:RankState")
def test_numbers_are_drawn_as_in_a_process(size) -> None:
    before = torch.get_rng_state(), random.getstate()
    alone = [VirtualCluster(1).run(draws, seed)[0] for seed in range(size)]
    together = VirtualCluster(size).run(lambda rank, size: draws(rank))
    assert together == alone
    torch.manual_seed(1)
    random.seed(1)
    assert torch.rand(()).item() == alone[1][0]
    assert random.random() == alone[1][1]
    torch.set_rng_state(before[0])
    random.setstate(before[1])


def test_unseeded_ranks_draw_different_numbers_and_the_same_in_each_run() -> None:
    def weights() -> list[float]:
        return nn.Linear(3, 2).weight.flatten().tolist()

    found = VirtualCluster(3).run(weights)
    assert len({tuple(each) for each in found}) == 3
    assert VirtualCluster(3).run(weights) == found


def modes(rank: int, size: int) -> list:
    dtype = [torch.float32, torch.float64, torch.bfloat16][rank]
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(rank == 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 2):
        dist.barrier()
        x = torch.ones(2, 2, requires_grad=True)
        inside = (x @ x).dtype
    dist.barrier()
    return [torch.get_default_dtype(), x.dtype, torch.is_grad_enabled(), inside]


def test_dtypes_and_modes() -> None:
    assert VirtualCluster(3).run(modes) == [
        [torch.float32, torch.float32, False, torch.float32],
        [torch.float64, torch.float64, True, torch.float64],
        [torch.bfloat16, torch.bfloat16, False, torch.bfloat16],
    ]
    assert torch.get_default_dtype() is torch.float32


def environment(rank: int, size: int) -> list:
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE")]
    os.environ["OF_A_RANK"] = str(rank)
    if rank:
        del os.environ["SHARED"]
    dist.barrier()
    found += [os.environ["OF_A_RANK"], os.getenv("SHARED"), "HOME" in os.environ]
    os.environ |= {"RANK": "9"}
    return [*found, os.environ.copy()["RANK"], os.environ.pop("OF_A_RANK")]


def test_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("SHARED", "all")
    monkeypatch.setenv("HOME", "/")
    assert VirtualCluster(2).run(environment) == [
        ["0", "2", "0", "all", True, "9", "0"],
        ["1", "2", "1", None, True, "9", "1"],
    ]
    assert os.environ["SHARED"] == "all"
    assert "OF_A_RANK" not in os.environ
    assert "RANK" not in os.environ


def counted(rank: int, size: int) -> tuple[int, int]:
    with CommLedger() as ledger:
        ring_all_reduce(torch.ones(8))
        if rank == 0:
            dist.send(torch.ones(5), 1)
        elif rank == 1:
            dist.recv(torch.ones(5), 0)
    return ledger.bytes_sent, ledger.bytes_received


def test_a_ledger_counts_its_own_rank() -> None:
    ring = 2 * 3 * 2 * 4  # 2 (N - 1) messages of a fourth of 8 floats
    assert VirtualCluster(4).run(counted) == [
        (ring + 20, ring), (ring, ring + 20), (ring, ring), (ring, ring),
    ]  # fmt: skip


def hooked(rank: int, size: int) -> list[float]:
    """Backward runs hooks that communicate, on each rank's own thread."""
    weight = torch.full((3,), float(rank + 1), requires_grad=True)
    seen: list[float] = []

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        seen.append(dist.get_rank())
        return total

    weight.register_hook(reduce)
    (weight.sum() * (rank + 1)).backward()
    return [*seen, *weight.grad.tolist()]


def test_hooks_of_a_backward_communicate() -> None:
    found = VirtualCluster(3).run(hooked)
    assert found == [[rank, 6.0, 6.0, 6.0] for rank in range(3)]


def test_warnings_filters_are_put_back() -> None:
    before = list(warnings.filters)
    VirtualCluster(2).run(lambda: warnings.simplefilter("error", FutureWarning))
    assert list(warnings.filters) == before
