"""Whether a schedule is complete, can be run, and stays within its memory."""

from collections import Counter, deque
from collections.abc import Iterator

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.passes import message_peer, receive_of, with_messages
from xtrain.schedules.simulate import simulate

SHOWN = 5


def validate(schedule: Schedule, activations: float | None = None) -> None:
    """Raise ValueError, with what is wrong, unless the schedule can be run.

    - Each stage does each micro-batch once, forward and backward (B and W, or BW), on
      the rank that holds it.
    - It is free of deadlocks, at any times, also when messages arrive in the order in
      which they were sent.
    - No rank holds more than `activations` micro-batches between forward and backward.
    """
    problems = list(_incomplete(schedule))
    if not problems:
        problems = _stuck(schedule) or list(_stuck_messages(schedule))
    if not problems and activations is not None:
        peaks = simulate(schedule).peak_activations
        problems = [
            f"rank {rank} holds {peak:g} micro-batches of activations, but "
            f"{activations:g} are allowed"
            for rank, peak in enumerate(peaks)
            if peak > activations
        ]
    if problems:
        more = len(problems) - SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise ValueError(f"{schedule.name}: {'; '.join(problems[:SHOWN])}{tail}")


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """What is missing, done twice, or done by a rank that does not hold the stage."""
    done: Counter[tuple[str, int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            for part in action.parts:
                kind, stage, i, _ = part
                if not (
                    0 <= stage < schedule.stages and 0 <= i < schedule.micro_batches
                ):
                    yield f"{part} is outside the stages and micro-batches"
                elif schedule.rank_of(stage, i) != rank:
                    holder = schedule.rank_of(stage, i)
                    yield f"rank {rank} does {part}, whose stage is on rank {holder}"
                else:
                    for one in ("B", "W") if kind == "BW" else (kind,):
                        done[one, stage, i] += 1
    for stage in range(schedule.stages):
        for i in range(schedule.micro_batches):
            for kind in ("F", "B", "W"):
                if (times := done[kind, stage, i]) != 1:
                    yield f"{stage}{kind}{i} is done {times} times"


def _stuck(schedule: Schedule) -> list[str]:
    try:
        simulate(schedule)
    except ValueError as error:
        return [str(error)]
    return []


def _stuck_messages(schedule: Schedule) -> Iterator[str]:
    """Ranks that wait forever, or get another message than the one they need.

    Sends return at once; between two ranks messages arrive as they were sent.
    """
    ordered = with_messages(schedule)
    at = [0] * schedule.ranks
    on_the_way: dict[tuple[int, int], deque[Action]] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ordered.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind.startswith("SEND"):
                    pair = rank, message_peer(schedule, action)
                    on_the_way.setdefault(pair, deque()).append(receive_of(action))
                elif action.kind.startswith("RECV"):
                    queue = on_the_way.get((message_peer(schedule, action), rank))
                    if not queue:
                        break
                    if (arrived := queue.popleft()) != action:
                        yield f"rank {rank} at {action} gets that of {arrived} instead"
                        return
                at[rank] += 1
                moved = True
    for rank, actions in enumerate(ordered.actions):
        if at[rank] < len(actions):
            yield f"rank {rank} waits forever at {actions[at[rank]]}"
