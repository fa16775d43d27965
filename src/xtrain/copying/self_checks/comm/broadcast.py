"""Every rank gets the root's tensor, whoever is the root."""

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.broadcast import broadcast


def check(rank: int, size: int) -> None:
    for src in reversed(range(size)):
        tensor = randn(1000, seed=rank)
        with Sent() as sent:
            broadcast(tensor, src)
        same(f"1,000 numbers of rank {src}", tensor, randn(1000, seed=src))
    children = [2, 0, 1, 0][rank]  # of the last root, 0: 0 -> 2, then 0 -> 1 and 2 -> 3
    sends(sent, "4,000 bytes to each child in the tree", children * tensor.nbytes)
