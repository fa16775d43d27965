# torchrun --nproc-per-node 2 snippets/lc5/stages.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.schedules import one_f_one_b

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
torch.set_default_dtype(torch.float64)
rank = dist.get_rank()
config = XtrainConfig(
    vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=5,
    num_attention_heads=2, tie_word_embeddings=True,
)  # fmt: skip
mesh = init_mesh((2,), ("pipeline",))
(stage,) = XtrainModel.stages(config, mesh, one_f_one_b(2, 2))
module = stage.module
held = sum(p.numel() for p in stage.parameters())
layers = sorted({name.split(".")[1] for name, _ in module.layers.named_parameters("l")})
print(f"rank {rank}: {stage.extra_repr()}: layers {', '.join(layers)}")
print(f"rank {rank}: {held} parameters, shared: {', '.join(stage.shared)}")

tokens = torch.arange(12).view(2, 6) * 7 % 40
labels = tokens.roll(-1, dims=1)
if rank == 0:  # what the runner will do, for one micro-batch
    x = module(tokens)
    dist.send(x.detach(), 1)
    gradient = torch.empty_like(x)
    dist.recv(gradient, 1)
    x.backward(gradient)
else:
    x = torch.empty(2, 6, 8, requires_grad=True)
    dist.recv(x.data, 0)
    total, count = module.loss_fn(module(x), labels)
    (total / count).backward()
    dist.send(x.grad, 0)
    print(f"rank 1: loss {(total / count).item():.6f}")

whole = XtrainModel(config)  # only to compare with
loss = whole.loss(tokens, labels)
loss.backward()
right = whole.embed_tokens.weight.grad
(tied,) = stage.shared.values()
print(f"rank {rank}: {tied.grad.norm() / right.norm():.3f} of the tied gradient's norm")
dist.all_reduce(tied.grad)  # the sum over both ends, which the runner takes
for name, parameter in module.named_parameters():
    torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
print(f"rank {rank}: summed, every gradient is the whole model's; loss {loss:.6f}")
dist.destroy_process_group()
