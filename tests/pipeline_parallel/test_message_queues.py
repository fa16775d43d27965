"""Messages where a backend runs those of one queue one after the other, as NCCL does.

A model of that, for every schedule at once. The CPU only fills queues. A message starts
when it is the first of its queue at both ends, and when what its ranks computed
before they issued it is done. What a rank computes waits for what it has received.
"""

from collections import deque
from collections.abc import Callable

import pytest

from xtrain.pipeline_parallel.communicators import lanes_of, pairs_of
from xtrain.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    forward_only,
    with_messages,
)
from xtrain.schedules.passes import message_peer, receive_of


def of_a_pair_each_way(peer: int, to: str) -> tuple:
    return peer, to


def of_a_pair(peer: int, to: str) -> tuple:
    return (peer,)


def of_all_each_way(peer: int, to: str) -> tuple:
    return (to,)


class Rank:
    """Its queues: what it computes and waits for, and messages."""

    def __init__(self, schedule: Schedule, rank: int, queue_of: Callable):
        self.schedule, self.rank, self.queue_of = schedule, rank, queue_of
        self.computes: deque = deque()  # None, or the message that is waited for
        self.issued = self.done = 0  # so many of these
        self.messages: dict[tuple, deque] = {}
        self.expected: dict[int, deque[Action]] = {}
        actions = schedule.actions[rank]
        for action in actions:
            if action.kind.startswith("RECV"):
                peer = message_peer(schedule, action)
                self.expected.setdefault(peer, deque()).append(action)
        for peer in self.expected:
            self.await_next(peer)
        for action in actions:
            if action.kind.startswith("SEND"):
                self.issue(action)
            else:
                self.compute(action)

    def compute(self, action: Action) -> None:
        received = action.kind.startswith("RECV")
        self.computes.append(self.message(action) if received else None)
        self.issued += 1
        if received:
            peer = message_peer(self.schedule, action)
            self.expected[peer].popleft()
            if self.expected[peer]:
                self.await_next(peer)

    def await_next(self, peer: int) -> None:
        self.issue(self.expected[peer][0])

    def issue(self, action: Action) -> None:
        sender, receiver, _ = message = self.message(action)
        peer = receiver if sender == self.rank else sender
        queue = self.queue_of(peer, "up" if sender < receiver else "down")
        self.messages.setdefault(queue, deque()).append((self.issued, message))

    def message(self, action: Action) -> tuple[int, int, Action]:
        """Its ranks and its receive, the same at both ends."""
        peer = message_peer(self.schedule, action)
        if action.kind.startswith("SEND"):
            return self.rank, peer, receive_of(action)
        return peer, self.rank, action

    def go_on(self, arrived: set) -> bool:
        before = self.done
        while self.computes and (
            self.computes[0] is None or self.computes[0] in arrived
        ):
            self.computes.popleft()
            self.done += 1
        return self.done > before

    def first(self) -> list[deque]:
        """The queues whose first message can start."""
        queues = [queue for queue in self.messages.values() if queue]
        return [queue for queue in queues if queue[0][0] <= self.done]


def left(schedule: Schedule, queue_of: Callable) -> int:
    """How many messages wait for one another in the end."""
    schedule = with_messages(schedule)
    ranks = [Rank(schedule, rank, queue_of) for rank in range(schedule.ranks)]
    arrived: set = set()
    moved = True
    while moved:
        moved = max([rank.go_on(arrived) for rank in ranks])
        ready: dict[tuple, list[deque]] = {}
        for queue in (queue for rank in ranks for queue in rank.first()):
            ready.setdefault(queue[0][1], []).append(queue)
        for message, queues in ready.items():
            if len(queues) == 2:  # at both ends
                arrived.add(message)
                for queue in queues:
                    queue.popleft()
                moved = True
    return sum(len(queue) for rank in ranks for queue in rank.messages.values())


def of_some_sizes(name: str) -> list[Schedule]:
    found = []
    for ranks in (2, 3, 4):
        for micro_batches in (3, 6, 8):
            try:
                found.append(SCHEDULES[name](ranks, micro_batches))
            except ValueError:  # none of this size
                continue
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.verifies(
    "xtrain.pipeline_parallel.communicators:pairs_of",
    "xtrain.pipeline_parallel.communicators:lanes_of",
)
def test_a_lane_has_one_pair_of_each_rank_and_few_lanes_have_all_pairs(name):
    """So a queue of a group is one of a pair and direction."""
    for schedule in of_some_sizes(name):
        sent = {
            (rank, message_peer(schedule, action))
            for rank, actions in enumerate(with_messages(schedule).actions)
            for action in actions
            if action.kind.startswith("SEND")
        }
        lanes = lanes_of(pairs_of(schedule))
        assert lanes.keys() == sent
        held = [(rank, lane) for pair, lane in lanes.items() for rank in pair]
        assert len(held) == len({*held})
        assert max(lanes.values()) < 6  # 4, but for a ring of an odd number of ranks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.verifies("xtrain.schedules.passes:message_peer")
def test_with_a_queue_for_each_pair_and_direction_no_message_waits_forever(name):
    schedules = of_some_sizes(name)
    assert schedules
    for schedule in schedules:
        for whole in (schedule, forward_only(schedule)):
            stuck = left(whole, of_a_pair_each_way)
            assert stuck == 0, (schedule.ranks, schedule.micro_batches)


@pytest.mark.parametrize("queue_of", [of_a_pair, of_all_each_way])
def test_with_fewer_queues_some_do(queue_of):
    assert left(SCHEDULES["one_f_one_b"](4, 8), queue_of) > 0
