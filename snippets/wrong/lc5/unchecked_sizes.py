# python snippets/wrong/lc5/unchecked_sizes.py
from collections import Counter

from xtrain.whiteboard.schedules.dualpipe import dualpipe


def backwards(ranks, m):
    """How often each micro-batch has its backward on rank 0, without any check."""
    found = Counter()
    for action in dualpipe(ranks, m)[0]:  # the bug: m is not what the schedule asks for
        for part in action.split("&"):
            kind, _, number = part[1:].partition("B")
            if number:
                found[int(number.removeprefix("W"))] += 1
    return [found[i] for i in range(max(m, max(found) + 1))]


if __name__ == "__main__":
    for m in (8, 9, 6):
        print(f"{m} micro-batches on 4 ranks: backwards {backwards(4, m)}")
