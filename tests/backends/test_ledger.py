"""What a ledger records of collectives that a backend of ours runs: exact bytes.

Over sockets the bytes of tensors that went to and came from other ranks; their headers
are not counted. In shared memory nothing is sent: the bytes that a rank wrote into its
stage, once however many read them, and those it read from the others' stages.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

from tests.backends.conftest import and_under_nccl_rules
from tests.comm.test_ledger import (
    asynchronous,
    closed_ledgers_cost_nothing,
    large_values,
    nested,
)
from xtrain.backends.shared_memory import SharedMemory
from xtrain.backends.socket_calls import INLINE_BYTES
from xtrain.comm import CommLedger
from xtrain.comm.call_agreement import uncounted

# What the tests here prove, for their marks.
COUNTED = (
    "xtrain.backends.shared_memory:SharedMemory",
    "xtrain.backends.socket_calls:SocketCalls",
    "xtrain.backends.sockets:Sockets",
    "xtrain.comm.ledger:CommLedger",
)

SMALL, LARGE = 1000, 400_000  # floats, divisible by every size below


def count(numel: int) -> dict[str, tuple[int, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = torch.ones(numel), torch.ones(numel // size)
    pieces = list(torch.ones(numel).chunk(size))
    mine = pieces if rank == 0 else None
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "asynchronous": lambda: dist.all_reduce(whole, async_op=True).wait(),
        "average": lambda: dist.all_reduce(whole, ReduceOp.AVG),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone()),
        "scatter": lambda: dist.scatter(part, mine, 0),
        "gather": lambda: dist.gather(part, mine, 0),
        "functional": lambda: functional.wait_tensor(
            functional.all_reduce(whole, "sum", dist.group.WORLD)
        ),
        "barrier": dist.barrier,
        "coalesced": lambda: dist.group.WORLD.allreduce_coalesced([whole] * 3).wait(),
    }
    counted = {}
    for name, call in calls.items():
        with CommLedger() as ledger:
            call()
        assert len(ledger.events) == 1, (name, ledger.events)
        assert ledger.events[0].kind == "collective"
        assert ledger.messages == 0
        counted[name] = (ledger.bytes_sent, ledger.bytes_received)
    return counted


def over_sockets(size: int, nbytes: int, rank: int) -> dict[str, tuple[int, int]]:
    part, others, small = nbytes // size, size - 1, nbytes <= INLINE_BYTES
    ring = 2 * others * part
    reduced = (others * nbytes,) * 2 if small else (ring, ring)
    passed_on = 0 if rank == size - 1 else nbytes
    sent = (others * nbytes * (rank == 0)) if small else passed_on
    return {
        "all_reduce": reduced,
        "asynchronous": reduced,
        "average": reduced,
        "functional": reduced,
        "broadcast": (sent, nbytes * (rank != 0)),
        "all_gather": (others * part, others * part),
        "reduce_scatter": (others * part, others * part),
        "all_to_all": (others * part, others * part),
        "scatter": (others * part * (rank == 0), part * (rank != 0)),
        "gather": (part * (rank != 0), others * part * (rank == 0)),
        "barrier": (0, 0),
        "coalesced": (3 * reduced[0], 3 * reduced[1]),
    }


def in_shared_memory(size: int, nbytes: int, rank: int) -> dict[str, tuple[int, int]]:
    part, others = nbytes // size, size - 1
    small = nbytes <= SharedMemory.ONE_SHOT_BYTES
    reduced = (nbytes, others * nbytes) if small else (nbytes, 2 * others * part)
    return over_sockets(size, nbytes, rank) | {
        "all_reduce": reduced,
        "asynchronous": reduced,
        "average": reduced,
        "functional": reduced,
        "coalesced": (3 * reduced[0], 3 * reduced[1]),
        "broadcast": (nbytes * (rank == 0), nbytes * (rank != 0)),
        "all_gather": (part, others * part),
        "reduce_scatter": (others * part, others * part),
    }


@and_under_nccl_rules
@pytest.mark.verifies(*COUNTED)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_collectives_tell_what_they_moved(ours, backend, size, numel):
    formula = over_sockets if backend == "xtrain-socket" else in_shared_memory
    for rank, counted in enumerate(ours(size).run(count, numel)):
        assert counted == formula(size, numel * 4, rank)


def messages_too() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    expected = [("recv", left), ("send", right)]
    with CommLedger() as ledger:
        if rank == 0:  # sends first: NCCL's first messages wait for their other end
            dist.send(torch.ones(5), right)
            expected.reverse()
        request = dist.irecv(torch.empty(5), left)
        if rank != 0:
            dist.send(torch.ones(5), right)
        request.wait()
    assert (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (20, 20, 1)
    assert [(e.kind, e.peer) for e in ledger.events] == expected
    members = dist.new_group([1, 2])
    if rank in (1, 2):
        with CommLedger() as ledger:
            if rank == 1:
                dist.send(torch.ones(5), 2, group=members)
            else:
                dist.recv(torch.ones(5), 1, group=members)
        assert ledger.events[0].peer == 3 - rank  # in the world's numbers


@and_under_nccl_rules
@pytest.mark.verifies(*COUNTED)
def test_messages_are_counted_with_global_ranks(ours):
    ours(3).run(messages_too)


def settled_when_they_end(path: str) -> None:
    """Two ledgers and four calls under way; rank 1 comes late to all of them."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.FileStore(path, 2)
    tensors = [torch.ones(n) for n in (4, 6, 8, 200_000)]
    dist.barrier()  # NCCL's first call waits for all ranks
    if rank == 1:
        store.wait(["issued"])
    with CommLedger() as outer, CommLedger(values=True) as inner:
        works = [dist.all_reduce(tensors[0], async_op=True)]
        with uncounted():  # neither an event of its own nor a part of the one before
            works.append(dist.all_reduce(tensors[1], async_op=True))
        works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors[2:]]
    works.append(dist.all_reduce(torch.ones(9), async_op=True))  # after them
    if rank == 0:
        for ledger in (outer, inner):
            assert [event.nbytes for event in ledger.events] == [None] * 3
            assert [event.received for event in ledger.events] == [None] * 3
        store.set("issued", "yes")
    for work in works:
        work.wait()
    for ledger in (outer, inner):
        assert [event.payload for event in ledger.events] == [16, 32, 800_000]
        assert [event.nbytes for event in ledger.events] == [16, 32, 800_000]
        assert [event.received for event in ledger.events] == [16, 32, 800_000]
    assert size == 2 and not dist.group.WORLD.on_collective_end


@and_under_nccl_rules
@pytest.mark.verifies(*COUNTED, "xtrain.comm.call_agreement:uncounted")
def test_an_event_gets_the_bytes_of_its_own_call_when_that_has_ended(ours, tmp_path):
    ours(2).run(settled_when_they_end, str(tmp_path / "store"))


@and_under_nccl_rules
@pytest.mark.verifies(*COUNTED)
def test_ledgers_nest_and_keep_rounds_and_values_as_over_gloo(ours):
    """What a call moved is known when it has ended: every open ledger is told."""
    for case in (nested, closed_ledgers_cost_nothing, asynchronous):
        ours(3).run(case)
    ours(2).run(large_values)
