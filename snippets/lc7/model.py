# torchrun --nproc-per-node 4 snippets/lc7/model.py
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel, load_hf, save_hf

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
mesh = init_mesh((2, 2), ("expert", "tensor"))
expert, tensor = mesh["expert"].get_local_rank(), mesh["tensor"].get_local_rank()
config = XtrainConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=12,  # of each expert
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.02,
)
whole = XtrainModel(config, dtype=torch.float64)  # what one process would train
model = XtrainModel(config, mesh, dtype=torch.float64)

torch.manual_seed(0)
tokens, labels = torch.randint(32, (2, 4, 8))  # of all ranks
mine = slice(2 * expert, 2 * expert + 2)  # expert ranks bring their own rows
loss = model.loss(tokens[mine], labels[mine])
loss.backward()
model.sync_gradients()

right = whole.loss(tokens, labels)
right.backward()
furthest = max(
    float((p.grad - model.placement(n).of(whole.get_parameter(n).grad)).abs().max())
    for n, p in model.named_parameters()
)
gate = model.layers[0].mlp.experts.gate_proj
print(
    f"expert {expert}, tensor {tensor}: gate_proj {list(gate.shape)}, loss {loss:.6f}, "
    f"of one process {right:.6f}, gradients agree to 1e-12: {furthest < 1e-12}"
)

folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folder)
save_hf(model, folder[0])  # one tensor for each matrix of each expert
again = load_hf(folder[0], mesh)
same = all(torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters())
if dist.get_rank() == 0:
    said = json.loads(Path(folder[0], "config.json").read_text())
    print(f"saved as {said['architectures']}; read back bit for bit: {same}")

dist.barrier()
dist.destroy_process_group()
