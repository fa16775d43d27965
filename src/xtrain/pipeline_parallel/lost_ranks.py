"""When a rank is lost, all others end and name it.

    rank 2 ends        rank 1 waits for it: its connection closes, it raises and ends
                       rank 0 waits for rank 1: its connection closes, too

Each would name its own neighbour. So each writes into the process group's store which
rank it waited for, and follows these entries: rank 0 waited for rank 1, rank 1 for
rank 2, and rank 2 wrote nothing, so it is the lost one. Each also writes whether it saw
a connection close or waited too long. Ranks time out at different times, so after a
timeout each waits a little for the entries of others. A stage that fails while other
ranks wait inside it writes that, too. A process that catches RankLost should end: its
groups cannot be used any more, and the ranks that wait for it notice only then.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from xtrain.comm.agreement import shortened
from xtrain.comm.checks import group_or_world
from xtrain.comm.mesh import timeout_of
from xtrain.comm.p2p import post_all
from xtrain.comm.transport_errors import in_short, is_timeout

WAITS, FAILED = "xtrain/pipeline/waits", "xtrain/pipeline/failed"
LOST, SILENT = "is lost", "does not answer"  # it ended, or nothing came in time
CLOSED_SECONDS = 0.2  # until an entry is there whose rank closed its connection
STORE_SECONDS = 2.0  # a store that takes longer is on the lost rank


class RankLost(RuntimeError):
    """A rank ended, or can no longer be reached, while others waited for it."""


@contextmanager
def naming_lost_ranks(
    peer: int | None, group: ProcessGroup, at: object
) -> Iterator[None]:
    """RankLost, with the rank that was lost first, for an error of the transport.

    Args:
        peer: the group rank that this one communicates with, if that is known.
        at: which action, for the message.
    """
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        others = [] if peer is None else [dist.get_global_rank(group, peer)]
        named = list(getattr(error, "ranks", ()))
        late = not named and is_timeout(error)
        seconds = 0.0 if named else patience(group) if late else CLOSED_SECONDS
        known = named or others
        first, what = ask_store(first_lost, known, seconds, late) or (known[:1], "")
        if not what:
            who = f"rank {first[0]}" if first else "a rank"
            what = f"{who} {SILENT if late else LOST}"
        here = f"rank {dist.get_rank()} was at {at} of the pipeline"
        peers = f", with rank {others[0]}" if others else ""
        text = f"{shortened(what, 100)}: {here}{peers}: {in_short(error)}"
        raise RankLost(shortened(text)) from error


def patience(group: ProcessGroup) -> float:
    """Seconds in which others time out, too: they began to wait at other times."""
    limit = timeout_of(group)
    return min(30.0, max(2.0, limit.total_seconds() / 10 if limit else 0.0))


def first_lost(
    store: Store, named: Sequence[int], seconds: float, late: bool
) -> tuple[list[int], str]:
    """The rank that was lost first, and how, by the entries of all ranks.

    Args:
        named: global ranks that this one waited for, or that its backend names.
        seconds: how long to wait for entries of others.
        late: this is after a timeout.
    """
    me, end = str(dist.get_rank()), time.monotonic() + seconds
    how = SILENT if late else LOST
    store.set(f"{WAITS}/{me}", f"{named[0] if named else me} {how}")
    while True:
        found = [follow(store, rank, how) for rank in named]
        failed = store.get(FAILED).decode() if store.check([FAILED]) else ""
        by, _, _ = failed.partition(" ")
        if failed and (late or not found or by in (me, str(found[0][0]))):
            return [int(by)], f"rank {failed}"
        if time.monotonic() >= end:
            what = "".join(f"rank {rank} {then}" for rank, then in found[:1])
            return [rank for rank, _ in found[:1]], what
        time.sleep(0.02)


def follow(store: Store, rank: int, how: str) -> tuple[int, str]:
    """From a rank to the one that it waited for, to the end; no rank comes twice.

    Args:
        how: what this rank saw of it; the last one that waited saw more.
    """
    seen = {dist.get_rank()}
    while rank not in seen and store.check([f"{WAITS}/{rank}"]):
        seen.add(rank)
        onward, _, then = store.get(f"{WAITS}/{rank}").decode().partition(" ")
        if int(onward) in seen:
            break
        rank, how = int(onward), then
    return rank, how


def write_failure(what: str) -> None:
    """Write that this rank has failed: others may wait for it inside a stage."""
    text = f"{dist.get_rank()} failed: {what}"
    ask_store(lambda store: store.compare_set(FAILED, "", text))


def clear_store() -> None:
    """Remove this rank's entries: a new pipeline begins, or a step has worked."""
    me = dist.get_rank()

    def clear(store: Store) -> None:
        store.delete_key(f"{WAITS}/{me}")
        if store.check([FAILED]) and store.get(FAILED).startswith(f"{me} ".encode()):
            store.delete_key(FAILED)

    ask_store(clear)


def ask_store(question: Callable[..., Any], *arguments: object) -> Any:
    """The store's answer; None if it is on the lost rank."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            store = dist.distributed_c10d._get_default_store()
            answers.append(question(store, *arguments))
        except (RuntimeError, ValueError):
            return

    longest = sum(a for a in arguments if isinstance(a, float)) + STORE_SECONDS
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(longest)
    return answers[0] if answers else None


Messages = list[tuple[Tensor, int]]


def exchange_by_peer(
    sends: Messages,
    recvs: Messages,
    group: ProcessGroup | None,
    at: object,
    tag: int = 0,
) -> None:
    """As `exchange_all`; the error names the peer that was lost."""
    wait_by_peer(post_by_peer(sends, recvs, group, at, tag), group, at)


def post_by_peer(
    sends: Messages,
    recvs: Messages,
    group: ProcessGroup | None,
    at: object,
    tag: int = 0,
) -> list[tuple[int, list[dist.Work]]]:
    """Post the messages with each peer, for `wait_by_peer`."""
    group = group_or_world(group)
    posted = []
    for peer in sorted({peer for _, peer in (*sends, *recvs)}):
        mine = [message for message in sends if message[1] == peer]
        theirs = [message for message in recvs if message[1] == peer]
        with naming_lost_ranks(peer, group, at):
            posted.append((peer, post_all(mine, theirs, group, tag)))
    return posted


def wait_by_peer(
    posted: list[tuple[int, list[dist.Work]]], group: ProcessGroup | None, at: object
) -> None:
    """Wait for all of them."""
    for peer, works in posted:
        with naming_lost_ranks(peer, group_or_world(group), at):
            for work in works:
                work.wait()
