"""Top-k router: each token chooses k experts and a weight for each.

    x -> logits [T, E] -> scores, by softmax or sigmoid -> the k largest -> gates [T, k]

Computes:   experts [T, k], their gates, and the scores of all experts, summing to 1.
Sends:      nothing: all ranks have the router's weight, and route their own tokens.
Leaves out: capacity, padded tokens, the auxiliary losses, checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TopKRouter(nn.Module):
    """Routes tokens [T, H]; a bias changes who is chosen, and no gate."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
    ):
        super().__init__()
        self.weight = nn.Linear(hidden_size, num_experts, bias=False).weight
        self.balance_bias = nn.Buffer(torch.zeros(num_experts))
        self.top_k, self.score, self.scale = top_k, score, scale
        self.renormalize, self.groups, self.top_groups = renormalize, groups, top_groups

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        logits = F.linear(x_TH.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach() + self.balance_bias)
        gates = scores.gather(-1, experts)  # the only way on which a gradient comes
        if self.renormalize:
            gates = gates / gates.sum(-1, keepdim=True)
        return experts, gates * self.scale, scores / scores.sum(-1, keepdim=True)

    def _choose(self, choice: Tensor) -> Tensor:
        if self.top_groups < self.groups:  # from the best groups, so from few nodes
            parts = choice.unflatten(-1, (self.groups, -1))
            best = parts.topk(max(1, self.top_k // self.top_groups))[0].sum(-1)
            best = best.topk(self.top_groups)[1]
            hidden = torch.ones_like(parts[..., 0], dtype=torch.bool)
            hidden.scatter_(-1, best, False)
            choice = parts.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)
        return choice.topk(self.top_k)[1]
