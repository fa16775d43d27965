# torchrun --nproc-per-node 4 snippets/lc4/attention.py
import os

import torch
import torch.distributed as dist

from xtrain.model import XtrainConfig
from xtrain.model.layer import Attention
from xtrain.tensor_parallel import ParallelAttention

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)  # the same whole layer and the same input on every rank

config = XtrainConfig(
    vocab_size=1, hidden_size=32, intermediate_size=1, num_hidden_layers=1,
    num_attention_heads=8, num_key_value_heads=2,
)  # fmt: skip
whole = Attention(config).double()
x, positions = torch.randn(2, 10, 32).double(), torch.arange(10)
y = whole(x, positions)
y.square().sum().backward()

block = ParallelAttention.from_full(whole)  # 2 key heads on 4 ranks
out = block(x)
out.square().sum().backward()

key = rank // 2  # ranks 0 and 1 hold key head 0, ranks 2 and 3 hold key head 1
expected = whole.k_proj.weight.grad.chunk(2)[key]
equal = torch.allclose(block.k_proj.weight.grad, expected)
print(f"rank {rank}: {len(block.q_proj.weight) // 4} query heads and "
      f"{len(block.k_proj.weight) // 4} key head, shared by {block.replica_ranks}; "
      f"output equal: {torch.allclose(out, y)}; "
      f"gradient of the keys equal: {equal}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
