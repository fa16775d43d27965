"""The steps of a ring: send to the next rank, receive from the one before.

    step 0    chunk c on its way to the next rank    chunk c - 1 arrives
    step 1    chunk c - 1 on its way                 chunk c - 2 arrives ...

A step needs what *arrived* in the one before, not that everything has left: so
`ring_send_recv` waits for its receive alone and returns a `Work` for its send. Where no
memory is used twice, `post_ring_recvs` posts the receives of all steps before anything
is sent.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world, rank_and_size, run_checks
from xtrain.comm.p2p import batches, post_all
from xtrain.comm.rounds import one_round
from xtrain.comm.work import Work


@dataclass(frozen=True, slots=True)
class PostedRecv:
    """A tensor whose receive is posted before its step of a ring comes."""

    tensor: Tensor
    works: list[dist.Work]  # empty where it is posted together with its step's send
    round: int | None = None  # of its step, for the ledger


def post_ring_recvs(
    tensors: list[Tensor], group: ProcessGroup | None = None
) -> list[PostedRecv]:
    """Post the receives of the next steps of a ring, in order, before anything is sent.

    A message that finds its receive posted flows at once; otherwise its sender is first
    told so, and that takes a round trip. Backends that batch (NCCL) post nothing here.
    """
    rank, size = rank_and_size(group)
    group, before = group_or_world(group), (rank - 1) % size
    posted = []
    for tensor in tensors:
        run_checks("tensor", "post_ring_recvs", tensor, group, contiguous=True)
        ahead = tensor.numel() > 0 and size > 1 and not batches(group, tensor.device)
        with one_round() as number:
            works = [group.recv([tensor.detach()], before, 0)] if ahead else []
        posted.append(PostedRecv(tensor, works, number))
    return posted


def ring_send_recv(
    send: Tensor, recv: Tensor | PostedRecv, group: ProcessGroup | None = None
) -> Work:
    """Send to the next rank, receive from the one before; return once `recv` is filled.

    `send` may still be on its way: wait for the result before changing it. Keep the
    result until the end of the algorithm: gloo frees a message that has only just
    arrived by spinning until its own thread lets go of it, and on a busy machine that
    takes longer than the message did.
    """
    rank, size = rank_and_size(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    posted = recv if isinstance(recv, PostedRecv) else PostedRecv(recv, [])
    with one_round(posted.round):
        if posted.works:
            arriving, leaving = posted.works, post_all([(send, after)], [], group)
        else:
            works = post_all([(send, after)], [(posted.tensor, before)], group)
            receives = min(1, posted.tensor.numel())  # come first; empty: no message
            arriving, leaving = works[:receives], works[receives:]
    for work in arriving:
        work.wait()
    return Work(leaving, keep=arriving)


def wait_all(in_flight: list[Work]) -> None:
    """Wait until everything has been sent, and empty the list."""
    for step in in_flight:
        step.wait()
    in_flight.clear()
