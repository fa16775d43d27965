"""When everything of a pipeline schedule happens: a simulator on one page.

    F of stage s waits for F of s - 1, B of s for B of s + 1, W for its own B

Computes:   start and end of every action of every rank, in the schedule's order.
Sends:      nothing; `p2p` is the time a message takes, and delays only who waits.
Leaves out: saying which rank waits for which, and how much memory is held.
"""

import re

Placed = tuple[str, float, float]


def simulate(
    schedule: list[list[str]],
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    overlapped: float | None = None,
    p2p: float = 0.0,
) -> list[list[Placed]]:
    """Actions such as 2F0, 2B0, 2W0, 2BW0, 2F4&5B1 with start and end."""
    lasts = {"F": forward, "B": backward_input, "W": backward_weight}
    lasts["BW"] = backward_input + backward_weight
    pair = overlapped or forward + lasts["BW"]
    stages = 1 + max(int(stage) for stage in re.findall(r"(\d+)F", str(schedule)))
    timeline: list[list[Placed]] = [[] for _ in schedule]
    done: dict[tuple[str, int, str], tuple[float, int]] = {}  # action -> end, rank

    def start_of(rank: int, parts: list[tuple[str, str, str]]) -> float | None:
        """When the rank is free and all that the parts need has come; None: not yet."""
        start = timeline[rank][-1][2] if timeline[rank] else 0.0
        for stage, kind, i in parts:
            before = {"F": ("F", int(stage) - 1), "W": ("B", int(stage))}
            what, where = before.get(kind, ("B", int(stage) + 1))
            if 0 <= where < stages:
                if (what, where, i) not in done:
                    return None
                end, source = done[what, where, i]
                start = max(start, end + p2p * (source != rank))
        return start

    moved = True
    while moved:  # round the ranks; each does as much as it can
        moved = False
        for rank, order in enumerate(schedule):
            for word in order[len(timeline[rank]) :]:
                parts = re.findall(r"(\d+)([FBW]+)(\d+)", word)
                start = start_of(rank, parts)
                if start is None:
                    break  # another rank first
                end = start + (pair if len(parts) > 1 else lasts[parts[0][1]])
                timeline[rank].append((word, start, end))
                done |= {(kind[0], int(s), i): (end, rank) for s, kind, i in parts}
                moved = True
    if any(len(t) < len(order) for t, order in zip(timeline, schedule, strict=True)):
        raise ValueError("the schedule deadlocks")
    return timeline
