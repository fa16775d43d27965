"""Every rank gets the root's tensor, whoever is the root."""

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.broadcast import broadcast


def check(rank: int, size: int) -> None:
    for src in range(size):
        tensor = randn(1000, seed=rank)
        with Sent() as sent:
            broadcast(tensor, src)
        same(f"1,000 numbers of rank {src}", tensor, randn(1000, seed=src))
    times = [0, 1, 0, 2][rank]  # the last root was 3: 3 -> 1, then 3 -> 0 and 1 -> 2
    sends(sent, "the root: log2(N) times 4,000 bytes", times * tensor.nbytes)
