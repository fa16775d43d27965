"""A staircase worked out by hand, and a schedule that cannot be."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import same


def check(form: Any) -> None:
    one = [[f"{s}F0", f"{s}BW0"] for s in range(4)]
    for rank, placed in enumerate(form(one)):
        same(f"rank {rank} begins its forward", placed[0][1], float(rank))
        same(f"rank {rank} begins its backward", placed[1][1], 4.0 + 2 * (3 - rank))
    late = form([["0F0", "0B0", "0W0"], ["1F0", "1B0", "1W0"]], 1, 2, 3, p2p=0.5)
    same("a message delays who waits for it", late[1][0], ("1F0", 1.5, 2.5))
    same("and again on the way back", late[0][1], ("0B0", 5.0, 7.0))
    same("the weights' part follows at once", late[0][2], ("0W0", 7.0, 10.0))
    try:
        form([["0BW0", "0F0"], ["1F0", "1BW0"]])
    except ValueError as error:
        same(
            "a backward before its forward", str(error), "the schedule waits for itself"
        )
