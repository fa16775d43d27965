# torchrun --nproc-per-node 4 snippets/lc6/ring_online_softmax.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.context_parallel import ring_online_softmax

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
keys = [3, 1, 4, 2]  # of each rank; their number may differ

scores = torch.randn(2, sum(keys), dtype=torch.float64)
scores[1, :4] = -torch.inf  # the second query sees no key of ranks 0 and 1
values = torch.randn(sum(keys), 5, dtype=torch.float64)
right = scores.softmax(-1) @ values

with CommLedger() as ledger:
    output, lse = ring_online_softmax(
        scores.split(keys, -1)[rank], values.split(keys)[rank]
    )
sent = [event.nbytes for event in ledger.events if event.op == "send"]

alone = scores.split(keys, -1)[rank].logsumexp(-1)
print(f"rank {rank}: {keys[rank]} keys, lse alone {alone[0]:.4f} and {alone[1]:.4f}, "
      f"of all {lse[0]:.4f} and {lse[1]:.4f}; sent {sent} bytes; "
      f"equal: {torch.allclose(output, right, atol=1e-14)}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
