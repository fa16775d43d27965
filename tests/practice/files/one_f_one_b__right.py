from collections import deque


def one_f_one_b(ranks, micro_batches):
    def of_rank(r):
        limit = ranks - r  # micro-batches that may wait here
        todo, waiting, order = deque(range(micro_batches)), deque(), []
        while todo or waiting:
            if todo and len(waiting) < limit:
                waiting.append(todo.popleft())
                order.append(f"{r}F{waiting[-1]}")
            else:
                order.append(f"{r}BW{waiting.popleft()}")
        return order

    return list(map(of_rank, range(ranks)))
