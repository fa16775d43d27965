# python snippets/lc6/flash_attention.py
import torch
import torch.nn.functional as F

from xtrain.context_parallel import flash_attention_backward, flash_attention_forward

torch.manual_seed(0)
length, scale = 600, 16**-0.5
q = torch.randn(1, 4, length, 16, dtype=torch.float64, requires_grad=True)
k, v = (
    torch.randn(1, 2, length, 16, dtype=torch.float64, requires_grad=True)
    for _ in range(2)
)  # two query heads share a key head
right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
grad_out = torch.randn_like(right)
gradients = torch.autograd.grad(right, (q, k, v), grad_out)

with torch.no_grad():
    out, lse = flash_attention_forward(q, k, v)
    found = flash_attention_backward(grad_out, q, k, v, out, lse)
print(f"kept beside q, k, v: out {list(out.shape)} and lse {list(lse.shape)}; "
      f"all scores: {[*out.shape[:2], length, length]}")  # fmt: skip
print(f"out equal: {torch.allclose(out, right, atol=1e-13)}")
for name, ours, torchs in zip(("dq", "dk", "dv"), found, gradients, strict=True):
    print(
        f"{name} {list(ours.shape)} equal: {torch.allclose(ours, torchs, atol=1e-12)}"
    )

with torch.no_grad():  # what softmax's backward takes from a whole row
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    P = (q @ keys.mT * scale - lse[..., None]).masked_fill(later, -torch.inf).exp()
    dP = grad_out @ values.mT
    whole_row, own_row = (P * dP).sum(-1), (grad_out * out).sum(-1)
    off = (P.sum(-1) - 1).abs().max().item()
    print(f"rows of exp(S - lse) add up to 1: {off < 1e-13}")
    print(f"rowsum(P * dP) = rowsum(dO * O): {torch.allclose(whole_row, own_row)}")

    # The last 100 queries see all of the first 500 keys: a part of the gradients.
    mine = slice(500, 600)
    part = flash_attention_backward(
        grad_out[:, :, mine], q[:, :, mine], k[:, :, :500], v[:, :, :500],
        out[:, :, mine], lse[:, :, mine], causal=False,
    )  # fmt: skip
    dS = P * (dP - own_row[..., None]) * scale
    by_hand = (dS[:, :, mine, :500].mT @ q[:, :, mine]).unflatten(1, (2, 2)).sum(2)
    print(f"dk from some queries alone: {torch.allclose(part[1], by_hand)}")
