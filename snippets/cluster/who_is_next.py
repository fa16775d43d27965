# python snippets/cluster/who_is_next.py
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, advance, flat, now


def pass_along(rank, size):
    """Compute, then pass a message on."""

    def tell(what):
        print(f"{now() * 1e6:5.1f} us  rank {rank} {what}")

    tell("begins")
    advance((3 - rank) * 10e-6)
    tell("has computed")
    token = torch.full((1000,), float(rank))
    if rank > 0:
        dist.recv(token, rank - 1)
        tell(f"has a message of rank {int(token[0])}")
    if rank < size - 1:
        dist.send(token, rank + 1)
        tell("has sent")


if __name__ == "__main__":
    VirtualCluster(3, flat(latency=2e-6, bandwidth=1e9)).run(pass_along)
