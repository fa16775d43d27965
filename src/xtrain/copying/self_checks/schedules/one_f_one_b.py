"""GPipe's bubble, and fewer micro-batches that wait."""

from xtrain.copying.self_checks.schedules.harness import played, same, show
from xtrain.whiteboard.schedules.one_f_one_b import one_f_one_b


def check() -> None:
    orders = one_f_one_b(4, 6)
    show(orders)
    idle, actions = played(orders)
    same("forwards and backwards of 4 stages and 6 micro-batches", actions, 4 * 6 * 2)
    same("idle time of rank 0, (p - 1)(F + BW)", idle[0], 3 * 3.0)
    ahead = [order.index(f"{rank}BW0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, p - r", ahead, [4, 3, 2, 1])
