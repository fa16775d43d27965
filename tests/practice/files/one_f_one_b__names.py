def schedule_of(rank, p, m):
    warmup = min(p - rank - 1, m)
    f = b = 0
    while f < warmup:
        yield f"F{f}"
        f += 1
    while b < m:
        if f < m:
            yield f"F{f}"
            f += 1
        yield f"B{b}"
        b += 1


def one_f_one_b(ranks, micro_batches):
    return [list(schedule_of(r, ranks, micro_batches)) for r in range(ranks)]
