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
from dataclasses import replace

from xtrain.schedules.action import REDUCE, Action, Schedule

Message = tuple[bool, int, int]  # forward?, stage that computed it, micro-batch


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with sends after, and receives before, what they belong to."""
    sent: dict[tuple[int, int], deque[Message]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            for part in action.parts:
                if message := message_out(schedule, part):
                    pair = rank, message_target(schedule, message)
                    sent.setdefault(pair, deque()).append(message)
    ordered = tuple(
        _with_messages(schedule, rank, sent) for rank in range(schedule.ranks)
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


def message_out(schedule: Schedule, action: Action) -> Message | None:
    """What other ranks need of this action; None if nothing."""
    kind, stage, i, _ = action
    forward = kind == "F"
    next_stage = stage + 1 if forward else stage - 1
    if kind not in ("F", "B", "BW") or not 0 <= next_stage < schedule.stages:
        return None
    if schedule.rank_of(next_stage, i) == schedule.rank_of(stage, i):
        return None
    return forward, stage, i


def message_target(schedule: Schedule, message: Message) -> int:
    """The rank that needs a message."""
    forward, stage, i = message
    return schedule.rank_of(stage + 1 if forward else stage - 1, i)


def _message_in(schedule: Schedule, action: Action) -> Message | None:
    """What this action needs of another rank; None if nothing."""
    kind, stage, i, _ = action
    before = stage - 1 if kind == "F" else stage + 1
    if kind not in ("F", "B", "BW") or not 0 <= before < schedule.stages:
        return None
    return message_out(schedule, Action("F" if kind == "F" else "B", before, i))


def _with_messages(
    schedule: Schedule, rank: int, sent: dict[tuple[int, int], deque[Message]]
) -> list[Action]:
    got: set[Message] = set()
    actions: list[Action] = []
    for action in schedule.actions[rank]:
        for part in action.parts:
            needed = _message_in(schedule, part)
            if needed is None:
                continue
            source = schedule.rank_of(needed[1], needed[2])
            while needed not in got:
                forward, stage, i = arrived = sent[source, rank].popleft()
                got.add(arrived)
                kind = "RECV_F" if forward else "RECV_B"
                actions.append(Action(kind, stage + 1 if forward else stage - 1, i))
        actions.append(action)
        for part in action.parts:
            if message := message_out(schedule, part):
                actions.append(
                    Action("SEND_F" if message[0] else "SEND_B", *message[1:])
                )
    return actions
