"""Passes add messages and reductions to an order of computations.

    2F0 2BW0                    the schedule's actions
    2RECV_F0 2F0 2SEND_F0       with messages: only where the neighbour stage is on
    2RECV_B0 2BW0 2SEND_B0      another rank
    ... 2BW7 2REDUCE            with reductions: after a stage's last gradient

Messages have no tags, as in NCCL, so a receive takes what the other rank sent first. A
receive therefore stands where its input is needed, unless that rank has sent something
before it: then it comes after the receive of that.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from xtrain.schedules.action import REDUCE, Action, Schedule


def with_messages(schedule: Schedule, ranks: Collection[int] | None = None) -> Schedule:
    """The schedule with sends after, and receives before, what they belong to.

    Args:
        ranks: whose orders are wanted, with messages; None for all of them.
    """
    sent: dict[tuple[int, int], deque[Action]] = {}  # its receives, by sender, receiver
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            for part in action.parts:
                if send := message_of(schedule, part, "SEND"):
                    pair = rank, message_peer(schedule, send)
                    sent.setdefault(pair, deque()).append(receive_of(send))
    ordered = tuple(
        _with_messages(schedule, rank, sent) if ranks is None or rank in ranks else []
        for rank in range(schedule.ranks)
    )
    return replace(schedule, actions=ordered)


def with_reductions(schedule: Schedule) -> Schedule:
    """The schedule with REDUCE of each stage after the last gradient of its weights."""
    actions = []
    for order in schedule.actions:
        last = {
            part.stage: at
            for at, action in enumerate(order)
            for part in action.parts
            if part.kind in ("W", "BW")
        }
        reduced: list[Action] = []
        for at, action in enumerate(order):
            reduced.append(action)
            reduced += [Action(REDUCE, s) for s in last if last[s] == at]
        actions.append(reduced)
    return replace(schedule, actions=tuple(actions))


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule's forwards alone, in their order: what an evaluation runs."""
    forwards = tuple(
        [part for action in order for part in action.parts if part.kind == "F"]
        for order in schedule.actions
    )
    return replace(schedule, name=f"{schedule.name}, forward only", actions=forwards)


def neighbours(schedule: Schedule, ranks: Collection[int]) -> set[int]:
    """These ranks and those with which they exchange messages."""
    return {
        schedule.rank_of(stage, i)
        for rank in ranks
        for own in schedule.stages_of(rank)
        for stage in range(max(own - 1, 0), min(own + 2, schedule.stages))
        for i in (0, schedule.micro_batches - 1)  # "mirror" has two directions
    }


def message_of(schedule: Schedule, action: Action, way: str) -> Action | None:
    """The send or the receive (`way`: "SEND", "RECV") of an action, if it needs one."""
    kind, stage, i, _ = action
    other = stage + (1 if (kind == "F") == (way == "SEND") else -1)
    if kind not in ("F", "B", "BW") or not 0 <= other < schedule.stages:
        return None
    if schedule.rank_of(other, i) == schedule.rank_of(stage, i):
        return None
    return Action(f"{way}_{kind[0]}", stage, i)


def other_stage(message: Action) -> int:
    """The stage at the other end of a send or a receive."""
    return message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)


def message_peer(schedule: Schedule, message: Action) -> int:
    """The rank at the other end."""
    return schedule.rank_of(other_stage(message), message.micro_batch)


def receive_of(send: Action) -> Action:
    """The receive that takes what this sends."""
    return Action(f"RECV_{send.kind[-1]}", other_stage(send), send.micro_batch)


def _with_messages(
    schedule: Schedule, rank: int, sent: dict[tuple[int, int], deque[Action]]
) -> list[Action]:
    got: set[Action] = set()
    actions: list[Action] = []
    for action in schedule.actions[rank]:
        for part in action.parts:
            needed = message_of(schedule, part, "RECV")
            if needed is None:
                continue
            source = message_peer(schedule, needed)
            while needed not in got:
                arrived = sent[source, rank].popleft()
                got.add(arrived)
                actions.append(arrived)
        actions.append(action)
        for part in action.parts:
            if send := message_of(schedule, part, "SEND"):
                actions.append(send)
    return actions
