"""Calls that torch's programs make seldom, and what a backend must refuse."""

import struct
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.backends.conftest import and_under_nccl_rules
from xtrain.backends import register, shared_empty
from xtrain.backends.arguments import row_sizes
from xtrain.backends.calls import fingerprint
from xtrain.backends.shared_all_reduce import IN_PLACE_BYTES
from xtrain.backends.socket_calls import CALL_HEADER


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for in_background in (False, True):
        mine = [torch.full((2, 3), float(rank)), torch.full((100_000,), 10.0 + rank)]
        lists = [[torch.empty_like(t) for t in mine] for _ in range(size)]
        future = dist.all_gather_coalesced(lists, mine, async_op=in_background)
        if in_background:
            future.wait()
        for source, (small, large) in enumerate(lists):
            assert small.eq(source).all() and large.eq(10 + source).all()

    group, opts = dist.group.WORLD, dist.AllreduceCoalescedOptions()
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 0, 200_000)]
    work = group.allreduce_coalesced(tensors, opts)
    assert work.wait(timedelta(seconds=60))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() is tensors
    for tensor in tensors:
        assert tensor.eq(size * (size + 1) / 2).all()

    wholes = [torch.empty(size * n) for n in (1, 50_000)]
    parts = [torch.full((n,), float(rank)) for n in (1, 50_000)]
    future = group.allgather_into_tensor_coalesced(wholes, parts).get_future()
    assert future.wait() is wholes or future.value() == wholes
    for whole, part in zip(wholes, parts, strict=True):
        rows = whole.view(size, -1)
        assert torch.equal(rows, torch.arange(float(size)).view(-1, 1).expand_as(rows))
        whole.fill_(1.0)
        part.zero_()
    group.reduce_scatter_tensor_coalesced(parts, wholes).wait()
    assert all(part.eq(size).all() for part in parts)


@pytest.mark.verifies("xtrain.backends.process_group:XtrainProcessGroup")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_coalesced_calls(ours, size):
    ours(size).run(coalesced)


def coalesced_in_the_background() -> None:
    """It returns before its peers have come, so a message may be sent meanwhile."""
    rank, tensors = dist.get_rank(), [torch.ones(3), torch.ones(200_000)]
    message = torch.full((1,), 7.0)
    dist.barrier()  # NCCL's first call waits for all ranks
    if rank == 1:
        dist.recv(message.zero_(), 0)
    work = dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceOptions())
    if rank == 0:
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="not done after"):
            work.wait(timedelta(seconds=0.1))
        dist.send(message, 1)
    work.wait()
    assert message.item() == 7 and all(t.eq(2).all() for t in tensors)


@and_under_nccl_rules
@pytest.mark.verifies(
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.torch_calls:TorchCalls",
    "xtrain.backends.works:Several",
)
def test_coalesced_calls_go_on_in_the_background(ours):
    ours(2).run(coalesced_in_the_background)


@pytest.mark.parametrize("text", ["cpu:{},cuda:nccl", "cuda:gloo,cpu:{}"])
@pytest.mark.verifies("xtrain.backends.group:refuse_other_devices")
def test_a_group_of_several_backends_is_refused_and_not_half_built(backend, text):
    """torch takes a group in Python for the whole, and drops the other half."""
    register()
    both = text.format(backend)
    with pytest.raises(
        ValueError, match=f'"{both}": torch would build {backend} alone'
    ):
        dist.init_process_group(both, store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def one_device() -> None:
    group = dist.new_group(backend=f"cpu:{dist.get_backend()}")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()


@and_under_nccl_rules
@pytest.mark.verifies("xtrain.backends.process_group:XtrainProcessGroup")
def test_its_own_device_may_be_named(ours):
    ours(2).run(one_device)


# -------------------------------------------------------------------- small guarantees


def test_splits_must_be_all_rows():
    assert row_sizes(torch.ones(3, 2), [1, 2], 2) == [2, 4]
    for splits in ([1, 1], [2, 2], [3], [1, 1, 1]):
        with pytest.raises(ValueError, match="for 3 rows and 2 ranks"):
            row_sizes(torch.ones(3, 2), splits, 2)


def header_of_another_call() -> str:
    """The right fingerprint under the number of another call: a stray header."""
    group = dist.new_group()
    transport, other = group._transport, 1 - dist.get_rank()
    dist.barrier(group)
    text = ""
    if dist.get_rank() == 0:
        check = fingerprint("barrier", None, None, None)
        header = CALL_HEADER.pack(transport.calls + 7, check, 0)
        assert transport.collective[other].write(memoryview(header)) == CALL_HEADER.size
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(
            RuntimeError, match="rank 0 sent the header of call"
        ) as raised:
            dist.barrier(group)
        text = str(raised.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return text


@pytest.mark.verifies(
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.socket_calls:SocketCalls",
    "xtrain.backends.sockets:Sockets",
)
def test_a_header_for_another_call_is_refused(worlds_of):
    assert struct.calcsize("<QQQ") == CALL_HEADER.size
    _, text = worlds_of("xtrain-socket").get(2).run(header_of_another_call)
    assert "is in call" in text


def overwritten_at_once() -> None:
    """Rank 0 goes on as soon as it may; rank 1 reads its finished slice late."""
    rank, count = dist.get_rank(), IN_PLACE_BYTES // 4
    tensor = shared_empty(count).fill_(rank + 1.0)
    transport = dist.group.WORLD._transport
    step_barrier = transport.step_barrier

    def late(*args):
        yield from step_barrier(*args)
        time.sleep(0.1)  # rank 0 must do nothing meanwhile: no event tells that

    if rank == 1:
        transport.step_barrier = late
    dist.all_reduce(tensor)
    if rank == 0:
        tensor.fill_(-1.0)
    else:
        del transport.step_barrier
        assert tensor.eq(3).all()


@pytest.mark.verifies(
    "xtrain.backends.process_group:XtrainProcessGroup",
    "xtrain.backends.shared_memory:SharedMemory",
)
def test_a_shared_tensor_may_be_overwritten_when_its_call_is_over(worlds_of):
    worlds_of("xtrain-shm").get(2).run(overwritten_at_once)
