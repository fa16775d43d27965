"""Any Python object as a message: its pickle, announced by its length.

Unpickling runs code that the sender chose, so these are for ranks of one trusted job.
"""

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import message_device, rank_and_size
from xtrain.comm.collectives import all_gather
from xtrain.comm.p2p import group_rank_of, recv, send
from xtrain.comm.rooted import broadcast, root_of


def send_object(
    obj: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Send `obj`; two messages, its length and its bytes."""
    peer = group_rank_of("dst", dst, group_dst, group)
    payload = _to_tensor(obj, group)
    send(_length(payload), group=group, group_dst=peer)
    send(payload, group=group, group_dst=peer)


def recv_object(
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> Any:
    """Receive what the other side sent by `send_object`."""
    peer = group_rank_of("src", src, group_src, group)
    length = _length(_empty(0, group))
    recv(length, group=group, group_src=peer)
    payload = _empty(int(length), group)
    recv(payload, group=group, group_src=peer)
    return _from_tensor(payload)


def broadcast_object(
    obj: Any = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> Any:
    """Return rank `src`'s object on every rank; the others' argument is ignored."""
    root = root_of("broadcast_object", "src", src, group_src, group)
    rank, _ = rank_and_size(group)
    payload = _to_tensor(obj, group) if rank == root else _empty(0, group)
    length = _length(payload)
    broadcast(length, group=group, group_src=root)
    if rank != root:
        payload = _empty(int(length), group)
    broadcast(payload, group=group, group_src=root)
    return obj if rank == root else _from_tensor(payload)


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object, in rank order, on every rank."""
    _, size = rank_and_size(group)
    payload = _to_tensor(obj, group)
    lengths = [_length(payload) for _ in range(size)]
    all_gather(lengths, _length(payload), group)
    payloads = [_empty(int(n), group) for n in lengths]
    all_gather(payloads, payload, group)
    return [_from_tensor(p) for p in payloads]


def _to_tensor(obj: Any, group: ProcessGroup | None) -> Tensor:
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    return payload.to(message_device(group))


def _from_tensor(payload: Tensor) -> Any:
    return pickle.loads(payload.cpu().numpy().tobytes())


def _empty(length: int, group: ProcessGroup | None) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, device=message_device(group))


def _length(payload: Tensor) -> Tensor:
    return torch.tensor(payload.numel(), device=payload.device)
