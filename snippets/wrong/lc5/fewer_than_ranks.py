# python snippets/wrong/lc5/fewer_than_ranks.py
from dataclasses import replace

from xtrain.schedules import one_f_one_b, parse_actions, validate


def order(rank, ranks, m):
    """1F1B of one rank."""
    warm_up = ranks - 1 - rank  # the bug: there may be fewer micro-batches than that
    actions = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        actions += [f"{rank}F{warm_up + i}", f"{rank}BW{i}"]
    return actions + [f"{rank}BW{i}" for i in range(max(0, m - warm_up), m)]


if __name__ == "__main__":
    for m in (4, 2):
        print(f"{m} micro-batches, rank 0 of 4: {' '.join(order(0, 4, m))}")
        orders = tuple(parse_actions(" ".join(order(r, 4, m))) for r in range(4))
        try:
            validate(replace(one_f_one_b(4, m), actions=orders))
        except ValueError as error:
            print(error)
