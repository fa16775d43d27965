# torchrun --nproc-per-node 4 snippets/lc4/whole_model.py
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
mesh = init_mesh((2, 2), ("data", "tensor"))
data, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
config = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,  # one key head, held by both tensor ranks
)
whole = XtrainModel(config, dtype=torch.float64)  # what one process would train
model = XtrainModel(config, mesh, dtype=torch.float64)

torch.manual_seed(0)
tokens, labels = torch.randint(32, (2, 4, 6))
labels[2:, :5] = -100  # rows 2 and 3 have one label each
mine = slice(2 * data, 2 * data + 2)  # the rows of this data rank

logits = model(tokens[mine])
loss = model.loss(tokens[mine], labels[mine])
loss.backward()  # sums over "tensor" happen in here
model.sync_gradients()  # and those over "data" in here

right = whole.loss(tokens, labels)
right.backward()
furthest = max(
    float((p.grad - model.placement(n).of(whole.get_parameter(n).grad)).abs().max())
    for n, p in model.named_parameters()
)
print(
    f"data {data}, tensor {tensor}: logits {list(logits.shape)}, "
    f"loss {loss:.6f}, of one process {right:.6f}, "
    f"gradients agree to 1e-12: {furthest < 1e-12}"
)

dist.destroy_process_group()
