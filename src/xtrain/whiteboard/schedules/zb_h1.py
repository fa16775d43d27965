"""ZB-H1: gradients of weights (W) wait until there is nothing better to do.

    rank 0  F0 F1 .  .  B0 W0 F2 B1 W1 ...    the first rank never puts W off,
    rank 1     F0 B0 F1 B1 W0 F2 B2 W1 ...    rank r puts it off by r micro-batches

Computes:   for each rank the order of F, B (gradient of the input) and W.
Sends:      what 1F1B sends; B is ready sooner than the whole backward was.
Leaves out: ZB-H2, which begins more forwards and never waits if F = B = W.
"""


def zb_h1(ranks: int, micro_batches: int) -> list[list[str]]:
    """Idle (p - 1)(F + B - W), where 1F1B is idle for (p - 1)(F + B + W)."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        order = [f"{rank}F{i}" for i in range(ahead)]
        weights = 0
        for i in range(micro_batches):
            order.append(f"{rank}B{i}")
            no_forward_left = i + ahead >= micro_batches
            if i >= rank or no_forward_left:
                order.append(f"{rank}W{weights}")
                weights += 1
            if not no_forward_left:
                order.append(f"{rank}F{i + ahead}")
        order += [f"{rank}W{i}" for i in range(weights, micro_batches)]
        orders.append(order)
    return orders
