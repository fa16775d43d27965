# python snippets/lc7/router.py
import torch

from xtrain.expert_parallel import TopKRouter, top_k_gradient

torch.manual_seed(0)
router = TopKRouter(hidden_size=6, num_experts=4, top_k=2)
x = torch.randn(5, 6)

routing = router(x)
for token in range(5):
    experts, gates = routing.experts_Tk[token], routing.gates_Tk[token]
    kept = ", ".join(f"{e}: {g:.3f}" for e, g in zip(experts, gates, strict=True))
    print(f"token {token} goes to experts with gates {{{kept}}}")
print(f"copies of each expert: {routing.counts_E.tolist()}")

# The gradient of top-k: a scatter into the scores that were chosen.
scores = routing.logits_TE.detach().softmax(-1).requires_grad_()
values, experts = scores.topk(2)
grad_values = torch.randn(5, 2)
values.backward(grad_values)
ours = top_k_gradient(grad_values, experts, num_experts=4)
print(f"gradient of top-k equals autograd's: {torch.equal(ours, scores.grad)}")
print(f"scores with a gradient: {(ours != 0).sum().item()} of {ours.numel()}")
