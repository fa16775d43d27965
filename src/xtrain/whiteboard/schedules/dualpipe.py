"""DualPipe: micro-batches enter at both ends; a forward hides a backward's messages.

    0F4&3B1 is an overlapped pair; micro-batches from m/2 on travel the other way

Computes:   for each rank the order of F, BW, pairs, B (input) and W (weights).
Sends:      activations and gradients to both neighbours, each stage being there twice.
Leaves out: checks: ranks even, m even and at least twice the ranks.
"""


def dualpipe(ranks: int, micro_batches: int) -> list[list[str]]:
    """Idle (p/2 - 1)(F&B + BW - 3W); p + 1 activations, two copies of the weights."""
    return [_of_rank(rank, ranks, micro_batches // 2) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, half: int) -> list[str]:
    depth = min(rank, ranks - 1 - rank)
    inner = ranks // 2 - depth - 1  # ranks from here to the middle
    stages, firsts = [rank, ranks - 1 - rank], [0, half]
    if rank >= ranks // 2:  # phase 0 enters at the nearer end
        stages, firsts = stages[::-1], firsts[::-1]
    forwards, backwards = list(firsts), list(firsts)
    order: list[str] = []
    put_off: list[str] = []

    def next_of(kind: str, phase: int, counts: list[int]) -> str:
        counts[phase] += 1
        return f"{stages[phase]}{kind}{counts[phase] - 1}"

    def step(word: str) -> None:
        if word == "W":
            order.append(put_off.pop(0))
        elif word[0] == "F":
            order.append(next_of("F", int(word[1]), forwards))
        elif word[0] == "&":  # forward of one phase, full backward of the other
            forward = next_of("F", int(word[1]), forwards)
            order.append(f"{forward}&{next_of('B', 1 - int(word[1]), backwards)}")
        else:
            order.append(next_of(word[:-1], int(word[-1]), backwards))
            if word[:-1] == "B":
                put_off.append(order[-1].replace("B", "W"))

    main = half - ranks + depth + 1
    middle = ["F0", "BW1", "&1"] if inner == 0 else ["&0", "&1"]
    last = [f"BW{i}" for _ in range(depth + 1) for i in (1, 0)]
    last[depth + 1 :] = [word.replace("BW", "B") for word in last[depth + 1 :]]
    for word in (
        ["F0"] * 2 * inner + ["F0", "F1"] * (depth + 1) + ["B1", "W", "F1"] * inner
        + middle + ["&0", "&1"] * (main - 1) + ["BW1", "&1"] * inner + last
        + ["W", "B0"] * inner + ["W"] * (depth + 1)
    ):  # fmt: skip
        step(word)
    return order
