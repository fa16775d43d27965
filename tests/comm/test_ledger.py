"""CommLedger counts to the byte, and message_rounds finds what runs side by side."""

import itertools
import os
import socket
import struct
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import P2POp
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from xtrain import comm
from xtrain.comm.call_agreement import uncounted
from xtrain.comm.events import Event
from xtrain.comm.ledger import MAX_VALUES
from xtrain.comm.message_rounds import Message
from xtrain.comm.wire_bytes import tcp_bytes_sent
from xtrain.plan import collective_traffic

ALL_REDUCES = (
    "ring_all_reduce",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "parameter_server_all_reduce",
)
PIECES = ("gather", "scatter", "ring_all_gather")  # a rank has one of the full tensor
EVEN = (*PIECES, "ring_reduce_scatter", "all_to_all")
ROOTED = ("broadcast", "broadcast_naive", "reduce", "gather", "scatter")
PLANNED = (
    *ALL_REDUCES,
    *ROOTED,
    "ring_all_gather",
    "ring_reduce_scatter",
    "all_to_all",
    "barrier",
)
DTYPE_OF = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


def run_by_name(name: str, numel: int, root: int, dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    share = numel // size if name in PIECES else numel
    tensor = torch.full((share,), rank, dtype=dtype)
    pieces = [torch.zeros(share, dtype=dtype) for _ in range(size)]
    on_root = pieces if rank == root else None
    if name in ("broadcast", "broadcast_naive", "reduce"):
        getattr(comm, name)(tensor, root)
    elif name == "gather":
        comm.gather(tensor, on_root, dst=root)
    elif name == "scatter":
        comm.scatter(tensor, on_root, src=root)
    elif name == "ring_all_gather":
        comm.ring_all_gather(torch.empty(numel, dtype=dtype), tensor)
    elif name == "ring_reduce_scatter":
        comm.ring_reduce_scatter(torch.empty(numel // size, dtype=dtype), tensor)
    elif name == "all_to_all":
        comm.all_to_all_single(torch.empty_like(tensor), tensor)
    elif name == "barrier":
        comm.barrier()
    else:
        getattr(comm, name)(tensor)


def planned_cases(size: int):
    """(name, numel, root, bytes per element) that every algorithm can do."""
    for name in PLANNED:
        for numel in (0, 1, 2, 5, 16, 101):
            itemsize = (1, 2, 4, 8)[numel % 4]
            if name in EVEN:
                numel *= size
            if name == "barrier":
                yield name, 1, 0, 4
                break
            for root in {0, size - 1} if name in ROOTED else {0}:
                yield name, numel, root, itemsize


def measure_all() -> list:
    results = []
    for name, numel, root, itemsize in planned_cases(dist.get_world_size()):
        with comm.CommLedger() as ledger:
            run_by_name(name, numel, root, DTYPE_OF[itemsize])
        results.append(
            (ledger.bytes_sent, ledger.bytes_received, ledger.messages, ledger.events)
        )
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.verifies(
    "xtrain.comm.ledger:CommLedger",
    "xtrain.comm.events:Event",
    "xtrain.comm.message_rounds:message_rounds",
)
def test_bytes_and_rounds_equal_the_formulas(world, size):
    by_rank = world(size).run(measure_all)
    for case, key in enumerate(planned_cases(size)):
        name, numel, root, itemsize = key
        options = {"root": root} if name in ROOTED else {}
        plan = collective_traffic(name, numel, size, **options).bytes(itemsize)
        sent, received, messages, events = zip(
            *(results[case] for results in by_rank), strict=True
        )
        assert sent == plan.sent, key
        assert received == plan.received, key
        rounds = comm.message_rounds(list(events))
        assert sum(messages) == sum(map(len, rounds)), key
        assert sum(m.nbytes for round_ in rounds for m in round_) == plan.total
        chunked = name in ("ring_all_reduce", "halving_doubling_all_reduce")
        if size == 1 or numel == 0 or (chunked and numel < size):
            assert len(rounds) <= plan.rounds, key  # empty chunks send no message
        else:
            assert len(rounds) == plan.rounds, key


@pytest.fixture
def gloo(xtrain_worlds):
    """Skip where the session runs another backend: the claim is about gloo."""
    if xtrain_worlds.backend != "gloo":
        pytest.skip(f"about gloo's collectives, not {xtrain_worlds.backend}'s")


def one_shot_by_wire(numel):
    with comm.CommLedger() as ledger:
        comm.one_shot_all_reduce(torch.ones(numel))
        dist.barrier()
    return ledger.wire_bytes, ledger.bytes_sent, ledger.events[0]


@pytest.mark.skipif(sys.platform != "linux", reason="TCP counters are Linux's")
@pytest.mark.verifies("xtrain.comm.ledger:CommLedger")
def test_one_shot_is_a_torch_collective_seen_on_the_wire(world, gloo):
    """Its bytes are the backend's business: one event, and the sockets' counters."""
    size, numel = 4, 50_000
    plan = collective_traffic("one_shot_all_reduce", numel, size).bytes(4)
    for wire, sent, event in world(size).run(one_shot_by_wire, numel):
        assert sent == 0
        assert (event.kind, event.op, event.nbytes) == (
            "collective",
            "alltoall_base",
            None,
        )
        assert event.payload == size * numel * 4
        assert plan.max_sent <= wire <= plan.max_sent * 1.05 + 10_000


def torch_collectives():
    """(name, call, op, payload, nbytes): torch's own as the ledger must see them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    six, pieces = torch.ones(6), [torch.ones(6) for _ in range(size)]
    whole = torch.ones(6 * size)
    on_root = pieces if rank == 0 else None
    yield lambda: dist.all_reduce(six), "allreduce", 24
    yield lambda: dist.broadcast(six, 0), "broadcast", 24
    yield lambda: dist.reduce(six, 0), "reduce", 24
    yield lambda: dist.all_gather(pieces, six), "allgather", 24 * size
    yield lambda: dist.all_gather_into_tensor(whole, six), "_allgather_base", 24 * size
    yield lambda: dist.reduce_scatter_tensor(six, whole), "_reduce_scatter_base", 24
    yield lambda: dist.reduce_scatter(six, pieces), "reduce_scatter", 24
    yield lambda: dist.gather(six, on_root), "gather", 24 * size if rank == 0 else 0
    yield lambda: dist.scatter(six, on_root), "scatter", 24
    yield (
        lambda: dist.all_to_all_single(whole, whole.clone()),
        "alltoall_base",
        24 * size,
    )
    if torch.__version__ >= (2, 12):  # before, gloo had no list form
        yield (
            lambda: dist.all_to_all(pieces, [t.clone() for t in pieces]),
            "alltoall",
            24 * size,
        )
    yield dist.barrier, "barrier", None
    yield dist.monitored_barrier, "monitored_barrier", 0
    yield (
        lambda: functional.all_reduce(six, "sum", dist.group.WORLD).wait(),
        "all_reduce",
        24,
    )
    yield lambda: dist.all_reduce(six, async_op=True).wait(), "allreduce", 24


def see_torch_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for call, op, payload in list(torch_collectives()):
        with comm.CommLedger() as ledger:
            call()
        assert len(ledger.events) == 1, (op, ledger.events)
        (event,) = ledger.events
        assert (event.rank, event.kind, event.op) == (rank, "collective", op)
        assert event.nbytes is None
        assert event.peer is None
        if payload is not None:
            assert event.payload == payload, op
        assert (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (0, 0, 0)

    right, left = (rank + 1) % size, (rank - 1) % size
    sent, landing = torch.ones(3, dtype=torch.float64), torch.empty(3).double()
    with comm.CommLedger() as ledger:
        for work in dist.batch_isend_irecv(
            [P2POp(dist.isend, sent, right), P2POp(dist.irecv, landing, left)]
        ):
            work.wait()
        if rank == 0:
            dist.send(sent, 1)
        elif rank == 1:
            dist.recv(landing)  # from anyone
    seen = [(e.kind, e.peer, e.nbytes) for e in ledger.events]
    expected = [("send", right, 24), ("recv", left, 24)]
    expected += {0: [("send", 1, 24)], 1: [("recv", None, 24)]}.get(rank, [])
    assert seen == expected
    assert ledger.bytes_sent == 24 + 24 * (rank == 0)
    assert ledger.bytes_received == 24 + 24 * (rank == 1)


@pytest.mark.verifies("xtrain.comm.ledger:CommLedger", "xtrain.comm.events:Event")
def test_torch_collectives_are_events_with_their_payload(world, gloo):
    world(3).run(see_torch_collectives)


def nested() -> None:
    size = dist.get_world_size()
    with comm.CommLedger() as outer:
        comm.ring_all_reduce(torch.ones(size))
        with comm.CommLedger() as middle:
            comm.ring_all_reduce(torch.ones(2 * size))
            with comm.CommLedger(values=True) as inner:
                comm.ring_all_reduce(torch.ones(3 * size))
                dist.all_reduce(torch.ones(5))
        comm.ring_all_reduce(torch.ones(4 * size))
    once = 2 * (size - 1) * 4
    # A backend of ours tells what torch's all-reduce sends, gloo does not.
    (torchs,) = [e for e in inner.events if e.kind == "collective"]
    extra, arrived = torchs.nbytes or 0, torchs.received or 0
    assert inner.bytes_sent == 3 * once + extra
    assert inner.bytes_received == 3 * once + arrived
    assert middle.bytes_sent == 5 * once + extra
    assert outer.bytes_sent == 10 * once + extra
    assert [e.kind for e in inner.events].count("collective") == 1
    assert [e.kind for e in outer.events].count("collective") == 1
    assert outer.messages == 4 * 2 * (size - 1)

    # The same ledger may be opened again: it goes on counting.
    with inner:
        comm.ring_all_reduce(torch.ones(size))
    assert inner.bytes_sent == 4 * once + extra
    with comm.CommLedger() as outer, uncounted():
        comm.ring_all_reduce(torch.ones(9))
        dist.all_reduce(torch.ones(9))
    assert outer.events == []


def torchs_counter_inside_and_outside() -> None:
    """CommDebugMode counts the collective; the ledger sees the ring's messages, too."""
    size = dist.get_world_size()
    counted, ledger = CommDebugMode(), comm.CommLedger()
    for modes in ((counted, ledger), (ledger, counted)):
        ledger.events.clear()
        with modes[0], modes[1]:
            dist.all_reduce(torch.ones(4))
            comm.ring_all_reduce(torch.ones(4 * size))
        assert counted.get_total_counts() == 1
        assert ledger.messages == 2 * (size - 1)
        assert [e.kind for e in ledger.events].count("collective") == 1


@pytest.mark.verifies("xtrain.comm.ledger:CommLedger")
def test_a_ledger_and_comm_debug_mode_may_be_open_together(world, gloo):
    world(3).run(torchs_counter_inside_and_outside)


def closed_ledgers_cost_nothing() -> None:
    """After a block, also one that raised, no mode is left in torch's dispatcher."""
    assert _get_current_dispatch_mode() is None
    with comm.CommLedger() as ledger:
        assert _get_current_dispatch_mode() is ledger
    with pytest.raises(KeyError), comm.CommLedger() as failed:
        raise KeyError("inside")
    assert _get_current_dispatch_mode() is None
    comm.ring_all_reduce(torch.ones(4))
    assert ledger.events == failed.events == []
    assert ledger.bytes_sent == ledger.bytes_received == ledger.messages == 0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(
    "xtrain.comm.ledger:CommLedger", "xtrain.comm.call_agreement:uncounted"
)
def test_ledgers_nest_and_leave_nothing_behind(world, size):
    world(size).run(nested)
    world(size).run(closed_ledgers_cost_nothing)


def wire(numel):
    """(payload, wire) of ours and of gloo's, with all bytes out before the end."""
    size = dist.get_world_size()
    tensor, shard = torch.ones(numel), torch.empty(numel // size)
    results = []
    for call in (
        lambda: comm.ring_all_reduce(tensor),
        lambda: comm.ring_reduce_scatter(shard, tensor),
        lambda: comm.ring_all_gather(tensor, shard),
        lambda: dist.all_reduce(tensor),
        lambda: dist.reduce_scatter_tensor(shard, tensor),
    ):
        dist.barrier()
        with comm.CommLedger() as ledger:
            assert ledger.wire_bytes >= 0  # can be read while open
            call()
            dist.barrier()
        first = ledger.wire_bytes
        dist.barrier()
        assert ledger.wire_bytes == first, "a closed ledger went on counting"
        results.append((ledger.bytes_sent, first))
    return results


@pytest.mark.skipif(sys.platform != "linux", reason="TCP counters are Linux's")
@pytest.mark.verifies("xtrain.comm.ledger:CommLedger")
def test_wire_bytes_are_what_really_left(world, gloo):
    """And gloo's own reduce-scatter sends an all-reduce's bytes."""
    size, numel = 4, 400_000
    by_rank = world(size).run(wire, numel)
    total = [
        [sum(r[case][kind] for r in by_rank) for kind in (0, 1)] for case in range(5)
    ]
    ours, gloo = total[:3], total[3:]
    for (payload, on_wire), factor in zip(ours, (2, 1, 1), strict=True):
        assert payload == factor * (size - 1) * numel * 4
        assert payload <= on_wire <= payload * 1.01 + 40_000
    all_reduce, reduce_scatter = gloo[0][1], gloo[1][1]
    assert gloo[0][0] == gloo[1][0] == 0
    ideal = (size - 1) * numel * 4
    assert 2 * ideal <= all_reduce <= 2.05 * ideal + 40_000
    assert 2 * ideal <= reduce_scatter <= 2.05 * ideal + 40_000


@pytest.mark.skipif(sys.platform != "linux", reason="TCP counters are Linux's")
@pytest.mark.verifies("xtrain.comm.wire_bytes:tcp_bytes_sent")
def test_what_tcp_sends_again_is_counted_once(monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        inode = os.fstat(client.fileno()).st_ino
        assert tcp_bytes_sent()[inode] == 0
        client.sendall(bytes(70_000))
        received = 0
        while received < 70_000:
            received += len(accepted.recv(70_000))
        assert tcp_bytes_sent()[inode] == 70_000

        ask = socket.socket.getsockopt

        def as_on_a_busy_machine(self, *what):
            info = bytearray(ask(self, *what))
            sent, again = struct.unpack_from("QQ", info, 200)
            struct.pack_into("QQ", info, 200, sent + 65_483, again + 65_483)
            return bytes(info)

        monkeypatch.setattr(socket.socket, "getsockopt", as_on_a_busy_machine)
        assert tcp_bytes_sent()[inode] == 70_000


def not_linux(monkeypatch_platform) -> None:
    before, sys.platform = sys.platform, monkeypatch_platform
    try:
        with comm.CommLedger() as ledger:
            comm.ring_all_reduce(torch.ones(4))
            assert ledger.wire_bytes is None
    finally:
        sys.platform = before
    assert ledger.wire_bytes is None
    assert ledger.bytes_sent > 0
    assert comm.CommLedger().wire_bytes is None


@pytest.mark.verifies("xtrain.comm.ledger:CommLedger")
def test_wire_bytes_are_none_where_the_system_does_not_tell(world):
    world(2).run(not_linux, "darwin")


def provenance():
    """Each element's value is a digit sum that tells whose parts are in it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with comm.CommLedger(values=True) as ledger:
        comm.ring_all_reduce(torch.full((size,), 10.0**rank))
    return ledger.events


def large_values() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, kept in ((MAX_VALUES, True), (MAX_VALUES + 1, False)):
        with comm.CommLedger(values=True) as ledger:
            comm.ring_shift(torch.full((numel,), rank), torch.empty(numel).long())
        for event in ledger.events:
            if event.kind == "send" and kept:
                assert event.values == (rank,) * numel
            else:
                assert event.values is None
    parameter = torch.nn.Parameter(torch.ones(2))
    with comm.CommLedger(values=True) as ledger:
        comm.ring_all_reduce(parameter)
    assert ledger.events[-1].values is None or size > 1
    with comm.CommLedger() as ledger:
        comm.ring_all_reduce(torch.ones(4))
    assert all(event.values is None for event in ledger.events)


@pytest.mark.verifies(
    "xtrain.comm.ledger:CommLedger", "xtrain.comm.message_rounds:message_rounds"
)
def test_values_tell_whose_parts_travel(world):
    size = 4
    rounds = comm.message_rounds(world(size).run(provenance))
    assert len(rounds) == 2 * (size - 1)
    for step, messages in enumerate(rounds):
        assert {(m.src, m.dst) for m in messages} == {
            (r, (r + 1) % 4) for r in range(4)
        }
        for message in messages:
            # In reduce-scatter a partial sum of step + 1 neighbours, then all four.
            parts = min(step + 1, size)
            owners = [(message.src - i) % size for i in range(parts)]
            assert message.values == (sum(10.0**owner for owner in owners),)
            assert message.round == step
            assert message.nbytes == 4
    world(2).run(large_values)


def asynchronous() -> None:
    """A call is written down when it is issued, not when it is waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(size)
    with comm.CommLedger() as ledger:
        handle = comm.all_to_all_single_async(output, torch.ones(size))
        issued = len(ledger.events)
        with comm.CommLedger() as waiting:
            handle.wait()
    assert issued == 2 * (size - 1)
    assert waiting.events == []
    assert ledger.bytes_sent == 4 * (size - 1)
    # All of it was posted before any of it was waited for.
    assert {event.done for event in ledger.events} == {issued}
    arriving = torch.empty(1)
    calls = [
        lambda: comm.isend(torch.ones(1), (rank + 1) % size),
        lambda: comm.irecv(arriving, (rank - 1) % size),
    ]
    if rank % 2:  # NCCL connects two ranks at their first message: no circle of them
        calls.reverse()
    with comm.CommLedger() as ledger:
        first, second = (call() for call in calls)
        assert [event.done for event in ledger.events] == [None, None]
        first.wait()
        assert [event.done for event in ledger.events] == [2, None]
        comm.ring_shift(torch.ones(1), torch.empty(1))
        second.wait()
    assert [event.number for event in ledger.events] == [0, 1, 2, 3]
    assert [event.done for event in ledger.events] == [2, 4, 4, 4]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.verifies(
    "xtrain.comm.ledger:CommLedger",
    "xtrain.comm.watched_work:WatchedWork",
    "xtrain.comm.p2p:post_all",
)
def test_asynchronous_calls_are_counted_when_issued(world, size):
    world(size).run(asynchronous)


def sub_group_events():
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank not in (1, 3):
        return []
    with comm.CommLedger() as ledger:
        comm.broadcast(torch.ones(5), src=3, group=group)
    return [(e.rank, e.kind, e.peer, e.nbytes) for e in ledger.events]


@pytest.mark.verifies("xtrain.comm.ledger:CommLedger", "xtrain.comm.events:Event")
def test_events_name_global_ranks(world):
    events = world(4).run(sub_group_events)
    assert events == [[], [(1, "recv", 3, 20)], [], [(3, "send", 1, 20)]]


def trace(rank, *calls):
    """Events of a rank: (kind, peer, bytes, number of calls when it was waited for)."""
    return [
        Event(rank, kind, kind, peer, nbytes, nbytes, number, done)
        for number, (kind, peer, nbytes, done) in enumerate(calls)
    ]


@pytest.mark.verifies(
    "xtrain.comm.message_rounds:message_rounds",
    "xtrain.comm.message_rounds:pair_up",
    "xtrain.comm.message_rounds:rounds_of",
    "xtrain.comm.message_rounds:Message",
    "xtrain.comm.events:Event",
)
def test_rounds_of_made_up_traces():
    # A chain 0 -> 1 -> 2: two rounds. 3 -> 4 is not part of it.
    chain = [
        trace(0, ("send", 1, 5, 1)),
        trace(1, ("recv", 0, 5, 1), ("send", 2, 6, 2)),
        trace(2, ("recv", 1, 6, 1)),
        trace(3, ("send", 4, 7, 1)),
        trace(4, ("recv", 3, 7, 1)),
    ]
    rounds = comm.message_rounds(chain)
    assert rounds == [
        [Message(0, 1, 5, 0), Message(3, 4, 7, 0)],
        [Message(1, 2, 6, 1)],
    ]
    # In any order of ranks.
    assert [len(r) for r in comm.message_rounds(chain[::-1])] == [2, 1]
    # Posted, but not waited for when the send leaves: no chain.
    chain[1] = trace(1, ("recv", 0, 5, 2), ("send", 2, 6, 2))
    assert [len(r) for r in comm.message_rounds(chain)] == [3]
    chain[1] = trace(1, ("recv", 0, 5, None), ("send", 2, 6, None))
    assert [len(r) for r in comm.message_rounds(chain)] == [3]

    # A swap is one round, whichever call of a rank comes first.
    swap = [
        trace(0, ("send", 1, 1, 2), ("recv", 1, 1, 2)),
        trace(1, ("recv", 0, 1, 2), ("send", 0, 1, 2)),
    ]
    assert [len(r) for r in comm.message_rounds(swap)] == [2]

    # Two messages share a round if both ends post them together; if one end waits in
    # between, the second is one round later.
    together, waits = (2, 2), (1, 2)
    for ends in itertools.product((together, waits), repeat=2):
        twice = [
            trace(
                0, *(("send", 1, b, d) for b, d in zip((10, 20), ends[0], strict=True))
            ),
            trace(
                1, *(("recv", 0, b, d) for b, d in zip((10, 20), ends[1], strict=True))
            ),
        ]
        rounds = comm.message_rounds(twice)
        sizes = [[10], [20]] if waits in ends else [[10, 20]]
        assert [[m.nbytes for m in r] for r in rounds] == sizes

    # What a rank waited for before an earlier send counts for all its later ones.
    later = [
        trace(0, ("send", 1, 1, 1)),
        trace(1, ("recv", 0, 1, 1), ("send", 2, 2, 3), ("send", 2, 3, 3)),
        trace(2, ("recv", 1, 2, 2), ("recv", 1, 3, 2)),
    ]
    assert [len(r) for r in comm.message_rounds(later)] == [1, 2]

    # Collectives of a foreign backend carry no messages.
    collective = Event(0, "collective", "allreduce", None, 24, None, 0)
    assert comm.message_rounds([[collective], []]) == []
    assert comm.message_rounds([]) == []


@pytest.mark.verifies(
    "xtrain.comm.message_rounds:message_rounds",
    "xtrain.comm.message_rounds:rounds_of",
)
def test_traces_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError, match="1 sends from rank 0 to rank 1, but 0 receives"
    ):
        comm.message_rounds([trace(0, ("send", 1, 1, 1)), []])
    with pytest.raises(
        ValueError, match="0 sends from rank 1 to rank 0, but 1 receives"
    ):
        comm.message_rounds([trace(0, ("recv", 1, 1, 1)), []])
    # Each receives before it sends: no run can have recorded that.
    both_receive = [
        trace(0, ("recv", 1, 1, 1), ("send", 1, 1, 2)),
        trace(1, ("recv", 0, 1, 1), ("send", 0, 1, 2)),
    ]
    with pytest.raises(ValueError, match="arrives before it is sent"):
        comm.message_rounds(both_receive)
