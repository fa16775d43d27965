# python snippets/wrong/lc5/first_letter.py
import re

from xtrain.whiteboard.schedules.gpipe import gpipe
from xtrain.whiteboard.schedules.one_f_one_b import one_f_one_b


def makespan(orders, cost):
    """When the last rank is done; `cost` by kind: F, B, W."""
    ends, free, left = {}, [0.0] * len(orders), [list(order) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order:
                stage, kind, i = re.fullmatch(r"(\d+)([FBW])W?(\d+)", order[0]).groups()
                before = int(stage) + (-1 if kind == "F" else 1)
                needs = [(str(before), kind, i)] * (0 <= before < len(orders))
                if kind == "B":
                    needs.append((stage, "F", i))
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + cost[kind]  # the bug: the kind may be BW
                ends[stage, kind, i] = free[rank]
                order.pop(0)
    return max(free)


if __name__ == "__main__":
    cost = {"F": 1.0, "B": 1.0, "W": 1.0}
    for schedule in (gpipe, one_f_one_b):
        found = makespan(schedule(4, 8), cost)
        right = (8 + 4 - 1) * sum(cost.values())
        print(f"{schedule.__name__}: makespan {found}, right is {right}")
