# python snippets/cluster/fsdp_at_256.py
import torch
from torch import nn

from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.zero import FullyShardedDataParallel

WIDTH, TOKENS = 16384, 2048


def second_step():
    """Virtual seconds of a forward and backward; the first one finds the order."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(4)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers), compute_dtype=torch.bfloat16,
        blocks=[nn.Linear], device="meta",
    )  # fmt: skip
    for _ in range(2):
        begun = now()
        model(torch.empty(TOKENS, WIDTH, device="meta")).sum().backward()
    return now() - begun


for ranks in (8, 256):
    cluster = VirtualCluster(ranks, dgx_h100(ranks // 8), accelerator="h100")
    seconds = max(cluster.run(second_step))
    computes = cluster.devices[0].seconds / 2  # of two steps
    print(f"{ranks:3} ranks: {seconds * 1e3:4.1f} ms, "
          f"waits {1 - computes / seconds:.0%} of it")  # fmt: skip
