"""message_rounds: which of the recorded messages can travel at the same time.

    rank 0   send to 1                      round 0   0 -> 1, 3 -> 4
    rank 1   receive from 0, send to 2      round 1   1 -> 2
    rank 2   receive from 1
    rank 3   send to 4
    rank 4   receive from 3

It puts the ledgers of all ranks together. The number of rounds is the latency of the
algorithm: the length of its longest chain of messages that wait for each other.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from xtrain.comm.events import Event

Pair = tuple[Event, Event]
"""A send and the receive that takes it."""


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

    A message travels once both its ends are free; an end is free when all messages of
    its earlier rounds have travelled. So a chain of hops takes as many rounds as it has
    hops, and what can run side by side shares a round. Raises ValueError when sends and
    receives do not pair up.
    """
    messages = pair_up(events)
    time = travel_times(messages)
    timeline: list[list[Message]] = [
        [] for _ in range(1 + max(time.values(), default=-1))
    ]
    for index, (send, receive) in enumerate(messages):
        message = Message(
            send.rank, receive.rank, send.payload, time[index], send.values
        )
        timeline[time[index]].append(message)
    return timeline


def travel_times(messages: list[Pair]) -> dict[int, int]:
    """The round in which each message travels, by its index."""
    waiting = _rounds_by_rank(messages)
    free = dict.fromkeys(waiting, 0)
    time: dict[int, int] = {}
    while len(time) < len(messages):
        now = {rank: rounds[0] for rank, rounds in waiting.items() if rounds}
        ready = [
            index
            for index, (send, receive) in enumerate(messages)
            if index not in time
            and index in now.get(send.rank, ())
            and index in now.get(receive.rank, ())
        ]
        if not ready:
            raise ValueError(
                "the recorded sends and receives wait for each other in a circle; "
                "calls that are issued together belong inside one_round()"
            )
        for index in ready:
            time[index] = max(free[end.rank] for end in messages[index])
        for rank, current in now.items():
            if all(index in time for index in current):
                free[rank] = 1 + max(time[index] for index in current)
                waiting[rank].popleft()
    return time


def _rounds_by_rank(messages: list[Pair]) -> dict[int, deque[list[int]]]:
    """The rounds of every rank in order, each a list of messages by their index."""
    rounds: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, pair in enumerate(messages):
        for end in pair:
            rounds[end.rank][end.round].append(index)
    return {
        rank: deque(own[number] for number in sorted(own))
        for rank, own in rounds.items()
    }


def pair_up(events: list[list[Event]]) -> list[Pair]:
    """The k-th send from a to b belongs to the k-th receive at b from a."""
    queues: dict[Any, tuple[list, list]] = defaultdict(lambda: ([], []))
    for event in (event for one_rank in events for event in one_rank):
        if event.kind == "send":
            queues[event.rank, event.peer][0].append(event)
        elif event.kind == "recv":
            queues[event.peer, event.rank][1].append(event)
    pairs: list[Pair] = []
    for (src, dst), (sends, receives) in queues.items():
        if len(sends) != len(receives):
            raise ValueError(
                f"{len(sends)} sends from rank {src} to rank {dst}, "
                f"but {len(receives)} receives"
            )
        pairs += zip(sends, receives, strict=True)
    return pairs
