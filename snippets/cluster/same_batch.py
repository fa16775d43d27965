# python snippets/cluster/same_batch.py
import torch
import torch.distributed as dist
from torch import nn

from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.zero import FullyShardedDataParallel

BATCH, WIDTH, LAYERS = 65_536, 8192, 4  # tokens of all ranks


class Block(nn.Sequential):
    def __init__(self):
        into = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        super().__init__(into, nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))


def step(rank, size):
    with torch.device("meta"):  # shapes and times, no numbers
        model = nn.Sequential(*[Block().bfloat16() for _ in range(LAYERS)])
        tokens = torch.empty(BATCH // size, WIDTH, dtype=torch.bfloat16)
    model = FullyShardedDataParallel(model, blocks=[Block], device="meta")
    for _ in range(2):  # from the second on it knows what to prefetch
        dist.barrier()
        begun = now()
        model(tokens).sum().backward()
    return now() - begun


for ranks in (16, 64):
    cluster = VirtualCluster(ranks, dgx_h100(ranks // 8), accelerator="h100")
    seconds = max(cluster.run(step))
    print(f"{ranks} ranks, {BATCH // ranks} tokens each: {1e3 * seconds:.1f} ms")
