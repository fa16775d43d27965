def gpipe(ranks, micro_batches):
    table = [[] for _ in range(ranks)]
    i = 0
    while i <= micro_batches:
        for r, row in enumerate(table):
            print("rank", r, "micro-batch", i, "of", micro_batches, table[r][:3])
        if i < micro_batches:
            for r, row in enumerate(table):
                row.append(f"{r}F{i}")
            i += 1
    for r, row in enumerate(table):
        row += [f"{r}BW{k}" for k in range(micro_batches)]
    return table
