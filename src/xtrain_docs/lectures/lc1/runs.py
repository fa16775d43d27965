"""Functions that run on every rank for the tables and figures of lc1."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xtrain import comm


def call(name: str, numel: int, root: int = 0) -> Callable[[], None]:
    """A collective of `xtrain.comm`, ready to be called with telling sizes.

    `numel` is the full tensor's, as in `xtrain.plan`: of an all-gather, a gather or a
    scatter this rank has a piece.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if name in ("gather", "scatter", "ring_all_gather", "all_gather_into_tensor"):
        numel //= size
    tensor = torch.full((numel,), float(rank))
    if name in ("broadcast", "broadcast_naive", "reduce"):
        return lambda: getattr(comm, name)(tensor, root)
    if name in ("gather", "scatter"):
        pieces = [torch.zeros(numel) for _ in range(size)] if rank == root else None
        where = {"dst": root} if name == "gather" else {"src": root}
        return lambda: getattr(comm, name)(tensor, pieces, **where)
    if name in ("ring_all_gather", "all_gather_into_tensor"):
        gathered = torch.empty(size * numel)
        return lambda: getattr(comm, name)(gathered, tensor)
    if name in ("ring_reduce_scatter", "reduce_scatter_tensor"):
        mine = torch.empty(numel // size)
        return lambda: getattr(comm, name)(mine, tensor)
    if name in ("all_to_all", "all_to_all_single"):
        arriving = torch.empty_like(tensor)
        return lambda: comm.all_to_all_single(arriving, tensor)
    if name == "barrier":
        return comm.barrier
    if name == "exchange":
        incoming = torch.empty_like(tensor)
        return lambda: comm.exchange(tensor, rank ^ 1, incoming, rank ^ 1)
    if name.startswith("hierarchical"):
        intra, inter = node_groups(int(name.rpartition("_")[2]))
        return lambda: comm.hierarchical_all_reduce(
            tensor, intra_group=intra, inter_group=inter
        )
    if name == "one_shot_by_p2p":
        return lambda: one_shot_all_reduce_by_p2p(tensor)
    return lambda: getattr(comm, name)(tensor)


def node_groups(local_ranks: int) -> tuple[Any, Any]:
    """This rank's groups when every `local_ranks` consecutive ranks share a node."""
    nodes = dist.get_world_size() // local_ranks
    mesh = comm.init_mesh((nodes, local_ranks), ("node", "local"))
    return mesh["local"].get_group(), mesh["node"].get_group()


def one_shot_all_reduce_by_p2p(tensor: torch.Tensor) -> None:
    """`one_shot_all_reduce` with our all-to-all in the place of torch's.

    torch's collective hides its messages inside the backend; ours shows them.
    """
    theirs = dist.all_to_all_single
    dist.all_to_all_single = comm.all_to_all_single
    try:
        comm.one_shot_all_reduce(tensor)
    finally:
        dist.all_to_all_single = theirs


def hierarchical_all_reduce_in_nodes(tensor: torch.Tensor, local_ranks: int) -> None:
    """`hierarchical_all_reduce` with `local_ranks` consecutive ranks a node."""
    intra, inter = node_groups(local_ranks)
    comm.hierarchical_all_reduce(tensor, intra_group=intra, inter_group=inter)


def one_exchange(tensor: torch.Tensor) -> None:
    """Every rank swaps its whole tensor with its neighbour: 0 with 1, 2 with 3."""
    partner = dist.get_rank() ^ 1
    incoming = tensor.clone()
    comm.exchange(tensor, partner, incoming, partner)
    tensor.add_(incoming)


def payload(name: str, numel: int, root: int) -> dict[str, Any]:
    """Bytes and messages of one call, and its events, as this rank saw them."""
    run = call(name, numel, root)
    with comm.CommLedger() as ledger:
        run()
    return {
        "sent": ledger.bytes_sent,
        "received": ledger.bytes_received,
        "messages": ledger.messages,
        "events": [
            [e.rank, e.kind, e.op, e.peer, e.payload, e.nbytes, e.round]
            for e in ledger.events
        ],
    }


def torch_call(name: str, numel: int) -> Callable[[], Any]:
    """One of torch's own collectives, of the same sizes as `call`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((numel,), float(rank))
    whole, part = torch.empty(numel), torch.empty(numel // size)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "reduce_scatter_tensor": lambda: reduce_scatter(part, tensor),
        "all_gather_into_tensor": lambda: all_gather(whole, part),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty_like(tensor), tensor
        ),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "reduce": lambda: dist.reduce(tensor, 0),
    }[name]


def on_the_wire(name: str, numel: int) -> dict[str, Any]:
    """Payload and wire bytes of one call, connections and buffers warm."""
    owner, _, what = name.partition(".")
    run = torch_call(what, numel) if owner == "torch" else call(what, numel)
    run()
    dist.barrier()
    time.sleep(0.05)  # let the last bytes of the barrier leave
    with comm.CommLedger() as ledger:
        run()
        time.sleep(0.05)  # gloo's thread may still be sending for this rank
    known = all(event.nbytes is not None for event in ledger.events)
    return {
        "payload": ledger.bytes_sent if known else None,
        "wire": ledger.wire_bytes,
    }


def cells_before_and_after(name: str, root: int) -> list[list[int]]:
    """This rank's cells before and after a collective, as telling whole numbers.

    Cell c of rank r holds the one bit r * N + c, so that every sum can be read back
    as the set of cells that are in it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([1 << (rank * size + c) for c in range(size)])
    nothing = torch.zeros(size, dtype=torch.int64)
    slots, slot = nothing.clone(), nothing.clone()[:1]
    if name in ("broadcast", "reduce"):
        before = mine if rank == root or name == "reduce" else nothing
        after = before.clone()
        getattr(comm, name)(after, root)
    elif name == "all_reduce":
        before, after = mine, mine.clone()
        comm.all_reduce(after)
    elif name in ("gather", "all_gather"):
        before, after = mine[:1], slots
        pieces = list(slots.view(size, 1).unbind())
        if name == "gather":
            comm.gather(before, pieces if rank == root else None, root)
        else:
            comm.all_gather(pieces, before)
    elif name == "scatter":
        before, after = mine if rank == root else nothing, slot
        pieces = list(mine.view(size, 1).unbind()) if rank == root else None
        comm.scatter(after, pieces, root)
    elif name == "reduce_scatter":
        before, after = mine, slot
        comm.reduce_scatter_tensor(after, before)
    elif name == "all_to_all":
        before, after = mine, slots
        comm.all_to_all_single(after, before)
    else:
        raise ValueError(f"no before-and-after picture of {name!r}")
    return [before.tolist(), after.tolist()]


def ring_step_orders(order: str) -> list[list[Any]]:
    """The events of N-1 ring shifts, with sends and receives in one of three orders.

    "rank 0 first": rank 0 sends then receives, the others receive then send.
    "even first": even ranks send then receive, odd ranks receive then send.
    "together": every rank posts both at once, as `ring_shift` does.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, incoming = torch.ones(1), torch.empty(1)
    right, left = (rank + 1) % size, (rank - 1) % size
    first = {"rank 0 first": rank == 0, "even first": rank % 2 == 0, "together": None}
    with comm.CommLedger() as ledger:
        for _ in range(size - 1):
            if first[order] is None:
                comm.ring_shift(mine, incoming)
            elif first[order]:
                comm.send(mine, right)
                comm.recv(incoming, left)
            else:
                comm.recv(incoming, left)
                comm.send(mine, right)
    return [
        [e.rank, e.kind, e.op, e.peer, e.payload, e.nbytes, e.round]
        for e in ledger.events
    ]


def bytes_on_axes(shape: list[int], axes: list[str], numel: int) -> list[int]:
    """Bytes this rank sends in a ring all-reduce over each axis of a mesh."""
    mesh = comm.init_mesh(tuple(shape), tuple(axes))
    counts = []
    for axis in axes:
        with comm.CommLedger() as ledger:
            comm.ring_all_reduce(torch.ones(numel), group=mesh[axis].get_group())
        counts.append(ledger.bytes_sent)
    return counts


def object_messages(layers: int) -> list[int]:
    """Bytes of the messages that rank 0 sends for one object, in order."""
    settings = {"layers": [f"layers.{n}" for n in range(layers)], "rate": 3e-4}
    with comm.CommLedger() as ledger:
        if dist.get_rank() == 0:
            comm.send_object(settings, dst=1)
        else:
            comm.recv_object(src=0)
    return [event.nbytes or 0 for event in ledger.events if event.kind == "send"]
