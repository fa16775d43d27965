# torchrun --nproc-per-node 4 snippets/lc6/whole_model.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
mesh = init_mesh((2, 2), ("context", "tensor"))
context, tensor = mesh["context"].get_local_rank(), mesh["tensor"].get_local_rank()
config = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
whole = XtrainModel(config, dtype=torch.float64)  # what one process would train
model = XtrainModel(config, mesh, context_attention="ring", dtype=torch.float64)

torch.manual_seed(0)
tokens, labels = torch.randint(32, (2, 3, 8))  # whole, and the same on every rank
labels[:, :6] = -100  # of 8 tokens the last two count, and rank 0 of zigzag has them

logits = model(tokens)
loss = model.loss(tokens, labels)
loss.backward()  # sums over "tensor" happen in here
model.sync_gradients()  # and those over "context" in here

right = whole.loss(tokens, labels)
right.backward()
furthest = max(
    float((p.grad - model.placement(n).of(whole.get_parameter(n).grad)).abs().max())
    for n, p in model.named_parameters()
)
gathered = model(tokens, gather_logits=True)  # of all tokens, in their order
agree = torch.allclose(gathered, whole(tokens), rtol=0, atol=1e-12)
print(
    f"context {context}, tensor {tensor}: logits {list(logits.shape)}, "
    f"loss {loss:.6f}, of one process {right:.6f}, "
    f"logits and gradients agree to 1e-12: {agree and furthest < 1e-12}"
)

dist.destroy_process_group()
