"""A rank that is lost: all others end, and say which one it was.

    rank 2 ends        rank 1 waits for it: its connection closes, it raises and ends
                       rank 0 waits for rank 1: its connection closes, too

Each would name the rank before it. So the first that notices writes the name into the
store that the ranks met at, and the others read it there. A process that catches
RankLost should end: nobody can be reached over the group any more, and those who wait
for it notice only then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.comm.p2p import post_all

KEY = "xtrain/pipeline/lost"


class RankLost(RuntimeError):
    """A rank ended, or can no longer be reached, while others waited for it."""


@contextmanager
def naming_lost_ranks(peer: int, group: ProcessGroup, at: object) -> Iterator[None]:
    """RankLost, with the rank that was lost first, for an error of the transport.

    Args:
        peer: the group rank that this one communicates with.
        at: which action, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        other = dist.get_global_rank(group, peer)
        raise RankLost(
            f"rank {first_lost(other)} is lost: rank {dist.get_rank()} was at {at} of "
            f"the pipeline, with rank {other}: {error}"
        ) from error


def first_lost(rank: int) -> int:
    """The global rank that was lost first, as far as anybody has told; else `rank`."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return int(store.compare_set(KEY, "", str(rank)))
    except RuntimeError:  # the store was on the rank that is lost
        return rank


def exchange_all(
    sends: list[tuple[Tensor, int]],
    recvs: list[tuple[Tensor, int]],
    group: ProcessGroup | None,
    at: object,
) -> None:
    """`xtrain.comm.p2p.exchange_all`, peer by peer: one that is lost has a name."""
    group = group_or_world(group)
    posted = []
    for peer in sorted({peer for _, peer in (*sends, *recvs)}):
        mine = [message for message in sends if message[1] == peer]
        theirs = [message for message in recvs if message[1] == peer]
        with naming_lost_ranks(peer, group, at):
            posted.append((peer, post_all(mine, theirs, group)))
    for peer, works in posted:
        with naming_lost_ranks(peer, group, at):
            for work in works:
                work.wait()
