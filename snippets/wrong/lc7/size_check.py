# python snippets/wrong/lc7/size_check.py


def check(world, pipeline, data, tensor, expert, experts):
    if pipeline * data * tensor != world:  # the bug: nothing is said about experts
        raise ValueError(f"{pipeline} x {data} x {tensor} is not {world}")


def check_right(world, pipeline, data, tensor, expert, experts):
    check(world, pipeline, data, tensor, expert, experts)
    if data % expert or experts % expert:
        raise ValueError(f"{expert} expert ranks must divide {data} data ranks and "
                         f"{experts} experts")  # fmt: skip


def lacking(data, expert, experts):
    """The experts that each group of expert ranks does not have."""
    local, found = experts // expert, []
    for first in range(0, data, expert):
        ranks = min(expert, data - first)
        found.append(list(range(ranks * local, experts)))
    return found


if __name__ == "__main__":
    for data, expert, experts in ((4, 2, 8), (6, 4, 8), (6, 3, 8)):
        sizes = (data, 1, data, 1, expert, experts)
        for rule in (check, check_right):
            try:
                rule(*sizes)
                said = f"passes; groups lack {lacking(data, expert, experts)}"
            except ValueError as error:
                said = f"{error}"
            print(f"{data} ranks, {expert} expert ranks, {rule.__name__:11}: {said}")
