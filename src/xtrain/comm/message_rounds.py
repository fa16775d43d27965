"""message_rounds: how many messages had to wait for each other, from recorded events.

    rank 0   sends to 1                        round 0   0 -> 1, 3 -> 4
    rank 1   receives from 0, then sends to 2  round 1   1 -> 2
    rank 2   receives from 1
    rank 3   sends to 4
    rank 4   receives from 3

A message travels when both its ends are posted. So it is one round later than the
latest message that one of its ends had waited for before it posted this one. What is
posted before anything is waited for shares a round. The number of rounds is the latency
of the algorithm: the length of its longest chain of messages.
"""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from xtrain.comm.events import Event

Pair = tuple[Event, Event]
"""A send and the receive that takes it."""
Step = int | tuple[int, int]
"""A message by its index, or one end of it: the rank and the number of its call."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a finished run, placed in time by `message_rounds`."""

    src: int
    dst: int
    nbytes: int
    round: int
    values: tuple[float, ...] | None = None


def message_rounds(events: list[list[Event]]) -> list[list[Message]]:
    """Place the messages of all ranks in time: entry t holds those of round t.

    Args:
        events: `ledger.events` of every rank, in any order.

    Raises ValueError when sends and receives do not pair up.
    """
    pairs = pair_up(events)
    rounds = rounds_of(pairs)
    timeline: list[list[Message]] = [[] for _ in range(1 + max(rounds, default=-1))]
    for (send, receive), number in zip(pairs, rounds, strict=True):
        message = Message(send.rank, receive.rank, send.payload, number, send.values)
        timeline[number].append(message)
    return timeline


def rounds_of(pairs: list[Pair]) -> list[int]:
    """The round of each message: the longest chain that its two ends had waited for."""
    by_rank: dict[int, list[tuple[int, bool, int]]] = defaultdict(list)
    for message, pair in enumerate(pairs):
        for end in pair:
            by_rank[end.rank].append((end.number, True, message))
            if end.done is not None:
                by_rank[end.rank].append((end.done, False, message))
    # A call at one end comes after the call before it and what was waited for between.
    graph: dict[Step, list[Step]] = {m: [] for m in range(len(pairs))}
    for rank, calls in by_rank.items():
        before: list[Step] = []
        for number, is_post, message in sorted(calls):  # at one number, waits first
            if is_post:
                graph[rank, number], before = before, [(rank, number)]
                graph[message].append((rank, number))
            else:
                before.append(message)
    rounds: dict[Step, int] = {}
    try:
        for step in TopologicalSorter(graph).static_order():
            earlier = [rounds[s] + isinstance(s, int) for s in graph[step]]
            rounds[step] = max(earlier, default=0)
    except CycleError:
        raise ValueError("a recorded message arrives before it is sent") from None
    return [rounds[message] for message in range(len(pairs))]


def pair_up(events: list[list[Event]]) -> list[Pair]:
    """The k-th send from a to b belongs to the k-th receive at b from a."""
    ends: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    for event in (event for one_rank in events for event in one_rank):
        if event.kind == "send":
            ends[event.rank, event.peer][0].append(event)
        elif event.kind == "recv":
            ends[event.peer, event.rank][1].append(event)
    pairs: list[Pair] = []
    for (src, dst), (sends, receives) in ends.items():
        if len(sends) != len(receives):
            raise ValueError(
                f"{len(sends)} sends from rank {src} to rank {dst}, "
                f"but {len(receives)} receives"
            )
        pairs += zip(sends, receives, strict=True)
    return pairs
