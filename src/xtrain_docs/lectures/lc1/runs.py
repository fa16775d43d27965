"""Functions that run on every rank for the tables and figures of lc1."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.comm.collective_kinds import kind_of, prepare


def call(name: str, numel: int, root: int = 0) -> Callable[[], Any]:
    """A collective of `xtrain.comm`, ready to be called with telling sizes.

    `numel` is the full tensor's, as in `xtrain.plan`. `hierarchical_4` has 4 ranks a
    node; `torch.` before a name makes it torch's own.
    """
    whole = torch.full((numel,), float(dist.get_rank()))
    if name == "exchange":
        return partial(swap, whole, torch.empty_like(whole))
    if name.startswith("hierarchical_"):
        intra, inter = node_groups(int(name.rpartition("_")[2]))
        function = partial(
            comm.hierarchical_all_reduce, intra_group=intra, inter_group=inter
        )
        return prepare("all_reduce", function, whole).run
    function = OTHERS[name] if name in OTHERS else getattr(comm, name)
    return prepare(kind_of(name), function, whole, root).run


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


def swap(tensor: torch.Tensor, incoming: torch.Tensor) -> None:
    """Neighbours send each other their whole tensors: 0 and 1, 2 and 3."""
    partner = dist.get_rank() ^ 1
    comm.exchange(tensor, partner, incoming, partner)


def one_exchange(tensor: torch.Tensor) -> None:
    """A swap after which both have the sum."""
    incoming = tensor.clone()
    swap(tensor, incoming)
    tensor.add_(incoming)


OTHERS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce_by_p2p": one_shot_all_reduce_by_p2p,
    "all_gather": comm.all_gather_into_tensor,
    "reduce_scatter": comm.reduce_scatter_tensor,
    "all_to_all": comm.all_to_all_single,
    "torch.all_reduce": dist.all_reduce,
    "torch.reduce_scatter_tensor": REDUCE_SCATTER,
    "torch.all_gather_into_tensor": ALL_GATHER,
    "torch.all_to_all_single": dist.all_to_all_single,
    "torch.broadcast": dist.broadcast,
    "torch.reduce": dist.reduce,
}
"""Names that are no function of `xtrain.comm`, or one of lists."""


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


def on_the_wire(name: str, numel: int) -> dict[str, Any]:
    """Payload and wire bytes of one call, connections and buffers warm."""
    run = call(name.removeprefix("xtrain."), numel)
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
    rank, size, kind = dist.get_rank(), dist.get_world_size(), kind_of(name)
    whole = torch.tensor([1 << (rank * size + c) for c in range(size)])
    if kind in ("gather", "all_gather"):
        whole.fill_(whole[0])  # of N ranks each has one cell only, its first
    function = OTHERS[name] if name in OTHERS else getattr(comm, name)
    prepared = prepare(kind, function, whole, root)
    before = prepared.given.tolist()
    prepared.run()
    return [before, prepared.result.tolist()]


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
