# torchrun --nproc-per-node 4 snippets/lc4/cross_entropy.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.tensor_parallel import vocab_parallel_cross_entropy

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tokens, vocabulary = 6, 32

whole = (60 * torch.randn(tokens, vocabulary)).requires_grad_()
labels = torch.tensor([1, 0, 7, -100, 3, 5])  # all in rank 0's columns, one ignored
right = F.cross_entropy(whole, labels)
right.backward()

local = whole.detach().chunk(size, -1)[rank].clone().requires_grad_()
loss = vocab_parallel_cross_entropy(local, labels)
loss.backward()

same = torch.allclose(local.grad, whole.grad.chunk(size, -1)[rank], atol=1e-7)
naive = local.detach().exp().sum(-1).log().mean()  # no largest logit taken off
print(f"rank {rank}: {list(local.shape)} of {list(whole.shape)} logits, "
      f"loss {loss:.4f}, in one process {right:.4f}; "
      f"gradient equal: {same}; log of the sum of exp: {naive:g}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
