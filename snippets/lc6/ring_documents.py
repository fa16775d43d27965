# torchrun --nproc-per-node 3 snippets/lc6/ring_documents.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.context_parallel import ring_attention, shard_sequence, unshard_sequence

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64)
documents = torch.tensor([[7, 7, 7, 7, 7, 3, 3, 3, 3, 3, -1, -1]])  # -1 is padding

out = ring_attention(
    *(shard_sequence(x, 2, "zigzag") for x in (q, k, v)),
    balance="zigzag",
    window=4,
    documents=shard_sequence(documents, 1, "zigzag"),  # cut as the tokens are
)
whole = unshard_sequence(out, 2, "zigzag")

x, y = torch.arange(12).unsqueeze(-1), torch.arange(12)
seen = (y <= x) & (x - y < 4)
seen = seen & (documents.mT == documents) & (documents.mT >= 0)
expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
if dist.get_rank() == 0:
    print(f"equal to a masked attention of one process: "
          f"{torch.allclose(whole, expected)}")  # fmt: skip
    print(f"outputs of the two padding tokens: {whole[0, :, 10:].abs().max():g}")

dist.barrier()
dist.destroy_process_group()
