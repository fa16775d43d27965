"""A gloo group beside the default one, for what lies on CPUs.

    default group   gradients, where the session's ranks have their tensors
    gloo group      CPU tensors, objects, barriers that name who has not come

With `--backend nccl` the two are of different backends, and a third group has one for
each device. Elsewhere the default group serves CPUs as well.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.devices import device_type as here
from xtrain import comm
from xtrain.comm.checks import message_device

LATE = timedelta(seconds=2)
pytestmark = pytest.mark.processes("gloo waits in C++, for ranks of other processes")


def is_nccl() -> bool:
    return dist.get_backend() == "nccl"


def both_move_at_once():
    rank, size = dist.get_rank(), dist.get_world_size()
    beside = dist.new_group(backend="gloo")
    gradient = torch.full((1000,), 1.0 + rank)
    work = dist.all_reduce(gradient, async_op=True)
    tokens = torch.tensor(rank, device="cpu")
    dist.all_reduce(tokens, group=beside)
    metrics = [None] * size
    dist.all_gather_object(metrics, {"rank": rank}, group=beside)
    dist.barrier(beside)
    work.wait()
    assert gradient.eq(size * (size + 1) / 2).all() and gradient.device.type == here()
    assert tokens.item() == size * (size - 1) / 2
    assert metrics == [{"rank": other} for other in range(size)]
    assert comm.all_gather_object(rank, beside) == list(range(size))
    return dist.get_backend(), dist.get_backend(beside)


@pytest.mark.world_sizes(2, 4)
def test_a_gloo_group_moves_objects_while_the_default_one_moves_gradients(
    world, world_size
):
    ranks = world(world_size)
    assert ranks.run(both_move_at_once) == [(ranks.backend, "gloo")] * world_size


def no_backend_for_it():
    """NCCL alone, or a group that is as narrow."""
    gpus_only = None if is_nccl() else dist.new_group(backend="cuda:gloo")
    with pytest.raises(RuntimeError, match="No backend type .* device type cpu"):
        dist.all_reduce(torch.ones(1, device="cpu"), group=gpus_only)


def test_a_tensor_on_the_cpu_finds_no_backend_in_a_group_for_gpus_alone(world):
    world(2).run(no_backend_for_it)


@pytest.mark.verifies("xtrain.comm.checks:message_device")
def test_our_own_messages_take_the_cpu_where_the_group_serves_it(world):
    world(2).run(devices_of_messages)


def devices_of_messages():
    beside = dist.new_group(backend="gloo")
    if here() in ("cpu", "cuda"):  # another device may be served beside the CPU
        assert message_device(None).type == ("cuda" if is_nccl() else "cpu")
    assert message_device(beside).type == "cpu"


def rank_1_does_not_come():
    beside = dist.new_group(backend="gloo")
    dist.barrier(beside)
    if dist.get_rank() == 1:
        return None
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(beside, LATE)
    return str(caught.value)


def test_gloos_barrier_names_the_rank_that_has_not_come(world):
    said = world(3).run(rank_1_does_not_come)
    assert "Rank 1 failed to pass monitoredBarrier" in said[0]


def a_backend_for_each_device():
    rank, size = dist.get_rank(), dist.get_world_size()
    backends = {"cpu": "gloo"} | ({"cuda": "nccl"} if is_nccl() else {})
    names = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    mixed = dist.new_group(backend=names)
    for device in backends:
        tensor = torch.tensor(float(rank), device=device)
        dist.all_reduce(tensor, group=mixed)
        assert tensor.item() == size * (size - 1) / 2
    objects = [None] * size
    dist.all_gather_object(objects, rank, group=mixed)  # over gloo
    assert objects == list(range(size)) and message_device(mixed).type == "cpu"
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier(mixed)


def test_a_group_may_have_a_backend_for_each_device(world):
    world(2).run(a_backend_for_each_device)


def bytes_on_the_device(group) -> int:
    """By how much an exchange of large objects raises what the GPU has held."""
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.max_memory_allocated()
    dist.all_gather_object([None] * dist.get_world_size(), bytes(1 << 20), group=group)
    return torch.accelerator.max_memory_allocated() - before


def objects_take_memory():
    beside = dist.new_group(backend="gloo")
    return bytes_on_the_device(None), bytes_on_the_device(beside)


def test_objects_of_a_group_of_nccl_alone_pass_through_the_gpu(world):
    if world(2).backend != "nccl":
        pytest.skip("the default group is not of NCCL")
    for default, beside in world(2).run(objects_take_memory):
        assert default >= 2 << 20 and beside == 0
