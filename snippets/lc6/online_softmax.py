# python snippets/lc6/online_softmax.py
import torch

from xtrain.context_parallel import online_softmax

torch.manual_seed(0)
scores = torch.randn(2, 9, dtype=torch.float64)
scores[1, :3] = -torch.inf  # the second query sees nothing of the first block
values = torch.randn(9, 4, dtype=torch.float64)
right = scores.softmax(-1) @ values

output, lse = torch.zeros(2, 4, dtype=torch.float64), torch.full((2,), -torch.inf)
for number, block in enumerate([slice(0, 3), slice(3, 6), slice(6, 9)], 1):
    block_lse = scores[:, block].logsumexp(-1)
    shift = block_lse.masked_fill(block_lse == -torch.inf, 0)  # -inf - -inf is NaN
    block_output = (scores[:, block] - shift[:, None]).exp() @ values[block]

    total = torch.logaddexp(lse.double(), block_lse)
    shift = total.masked_fill(total == -torch.inf, 0)
    output = output * (lse - shift).exp()[:, None]
    output += block_output * (block_lse - shift).exp()[:, None]
    lse = total
    print(f"after block {number}: lse {lse[0]:.4f} and {lse[1]:.4f}, "
          f"first output {output[0, 0]:.4f} and {output[1, 0]:.4f}")  # fmt: skip

library, library_lse = online_softmax(scores, values, block_size=3)
for name, found in (("by hand", output), ("library", library)):
    print(f"{name}: equal to softmax {torch.allclose(found, right, atol=1e-14)}")
print(f"lse equal: {torch.equal(lse, library_lse)}")
last_first = online_softmax(scores.flip(-1), values.flip(0), block_size=4)[0]
print(f"last keys first, blocks of 4: equal {torch.allclose(last_first, right)}")
