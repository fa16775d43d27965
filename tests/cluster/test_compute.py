"""Compute by counted operations, and the memory that ranks hold."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xtrain.cluster import VirtualCluster, flat, now
from xtrain.plan.hardware import Accelerator

DEVICE = "xtrain.cluster.compute:Device"
H100 = Accelerator.preset("h100")
N, TOKENS = 4096, 2048


def run(fn, size=1, **options):
    cluster = VirtualCluster(size, accelerator="h100", **options)
    return cluster.run(fn), cluster


def product() -> float:
    a, b = torch.empty(2, N, N, dtype=torch.bfloat16, device="meta").unbind()
    begun = now()
    a @ b
    return now() - begun


def thin_product() -> float:
    row = torch.empty(1, N, dtype=torch.bfloat16, device="meta")
    matrix = torch.empty(N, N, dtype=torch.bfloat16, device="meta")
    begun = now()
    row @ matrix
    return now() - begun


def views() -> float:
    x = torch.empty(N, N, device="meta")
    begun = now()
    x.view(-1)[3:].unsqueeze(0).expand(2, -1)
    x.t()
    torch.empty_like(x)
    return now() - begun


@pytest.mark.verifies(DEVICE)
def test_an_operator_takes_the_roofline() -> None:
    ((found,), _), ((thin,), _) = run(product), run(thin_product)
    assert found == pytest.approx(2 * N**3 / H100.flops, rel=1e-12)
    nbytes = 2 * (N * N + 2 * N)  # the matrix, the row and the result
    assert thin == pytest.approx(nbytes / H100.memory_bandwidth, rel=1e-12)
    assert run(views)[0] == [0.0]


def block(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    return second(torch.relu(first(x)))


def trains(device: str, recompute: bool = False) -> None:
    with torch.device(device):
        layers = [(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(4)]
        x = torch.ones(TOKENS, 64, requires_grad=True)
    for pair in layers:
        if recompute:
            x = checkpoint(block, x, *pair, use_reentrant=False)
        else:
            x = block(x, *pair)
    x.sum().backward()


def test_shapes_alone_take_the_same_time_and_memory_as_data() -> None:
    (_, real), (_, meta) = run(trains_on("cpu")), run(trains_on("meta"))
    assert meta.devices[0].flops == real.devices[0].flops
    products = 4 * 2 * 2 * TOKENS * 64 * 256  # layers, matrices, FLOPs
    assert meta.devices[0].flops == 3 * products
    assert meta.seconds == real.seconds
    assert meta.devices[0].peak == real.devices[0].peak


def trains_on(device: str, recompute: bool = False):
    return lambda: trains(device, recompute)


def test_recomputation_takes_time_and_saves_memory() -> None:
    (_, plain), (_, again) = run(trains_on("meta")), run(trains_on("meta", True))
    # of a block's two products the first is needed again
    assert again.devices[0].flops == plain.devices[0].flops * 7 // 6
    kept = TOKENS * 256 * 4  # of a block: what relu gives
    saved = plain.devices[0].peak - again.devices[0].peak
    assert 2 * kept < saved <= 3 * kept  # of four blocks, one is computed again


def holds() -> list[int]:
    device = dist.distributed_c10d._get_default_group()._scheduler.current.state.device
    found = [device.allocated]
    a = torch.zeros(100)
    b = a[:50]
    found.append(device.allocated)
    del a
    found.append(device.allocated)
    del b
    found.append(device.allocated)
    c = torch.zeros(10)
    c.untyped_storage().resize_(0)
    found.append(device.allocated)
    c.untyped_storage().resize_(80)
    return [*found, device.allocated, device.peak]


def test_memory_lives_as_long_as_its_storage() -> None:
    (found,), _ = run(holds)
    start, *rest, peak = found
    assert [each - start for each in rest] == [400, 400, 0, 0, 80]
    assert peak == start + 400


def overlaps() -> list[float]:
    x = torch.empty(250_000, device="meta")
    work = dist.all_reduce(x, async_op=True)
    product()
    middle = now()
    work.wait()
    return [middle, now()]


def test_products_go_on_beside_a_collective() -> None:
    size, nbytes = 2, 1_000_000
    cluster = VirtualCluster(size, flat(0.0, 1e9), accelerator="h100")
    found = cluster.run(overlaps)
    compute, reduced = 2 * N**3 / H100.flops, 2 * nbytes / size / 1e9
    assert found[0] == pytest.approx([compute, max(compute, reduced)], rel=1e-9)


def test_an_unknown_accelerator_is_named() -> None:
    with pytest.raises(ValueError, match="h100"):
        VirtualCluster(2, accelerator="h1000")
