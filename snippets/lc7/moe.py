# python snippets/lc7/moe.py
import torch

from xtrain.expert_parallel import MoE, moe_backward, moe_forward

torch.manual_seed(0)
layer = MoE(8, 12, num_experts=6, top_k=2, backward="autograd", dtype=torch.float64)
x = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
grad = torch.randn(10, 8, dtype=torch.float64)
layer(x).backward(grad)
print(f"rows of each expert: {layer.router.stats.counts_E.tolist()}")

experts = layer.experts
weights = {
    "router": layer.router.weight,
    "gate_proj": experts.gate_proj,
    "up_proj": experts.up_proj,
    "down_proj": experts.down_proj,
}
y, saved = moe_forward(x.detach(), *(w.detach() for w in weights.values()), top_k=2)
gradients = moe_backward(grad, saved)

far = (y - layer(x)).abs().max().item()
print(f"output: below 1e-12 from the layer's: {far < 1e-12}")
right = [x.grad, *(weight.grad for weight in weights.values())]
for name, ours, autograd in zip(("x", *weights), gradients, right, strict=True):
    far = (ours - autograd).abs().max().item()
    print(f"gradient of {name}: below 1e-12 from autograd's: {far < 1e-12}")
