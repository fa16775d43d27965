"""ZB-H2: more forwards at the start, so that no rank waits if F = B = W.

    rank 0  F0 F1 F2 B0 W0 F3 B1 W1 ...    2(p - r) - 1 forwards fill the time until
    rank 1     F0 B0 F1 B1 F2 B2 W0 ...    the first gradient comes back to rank r

Computes:   for each rank the order of F, B (gradient of the input) and W.
Sends:      what 1F1B sends; B is ready sooner than the whole backward was.
Leaves out: an optimizer step that waits for no other rank: they end at other times.
"""


def zb_h2(ranks: int, micro_batches: int) -> list[list[str]]:
    """Idle (p - 1)(F + B - 2W); 2(p - r) - 1 micro-batches wait; in 1F1B p - r do."""
    orders = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - rank) - 1, micro_batches)
        order = [f"{rank}F{i}" for i in range(ahead)]
        weights = 0
        for i in range(micro_batches):
            order.append(f"{rank}B{i}")
            no_forward_left = i + ahead >= micro_batches
            if i >= 2 * rank or no_forward_left:
                order.append(f"{rank}W{weights}")
                weights += 1
            if not no_forward_left:
                order.append(f"{rank}F{i + ahead}")
        order += [f"{rank}W{i}" for i in range(weights, micro_batches)]
        orders.append(order)
    return orders
