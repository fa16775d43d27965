"""What a router gives one token, and the gradient that comes back to its scores."""

import torch

from xtrain.expert_parallel import TopKRouter

LOGITS = (2.0, 1.0, 0.5, -1.0)
TOP_K = 2
KINDS = (("softmax", False), ("softmax", True), ("sigmoid", False), ("sigmoid", True))


def gates_and_gradients() -> list[dict[str, list[float]]]:
    """Of each kind of gate: the gates, and d(first gate) / d(logits).

    The router's weight is the identity, so the token is its own logits.
    """
    found = []
    for score, renormalize in KINDS:
        experts = len(LOGITS)
        router = TopKRouter(
            experts, experts, TOP_K, score=score, renormalize=renormalize
        ).double()
        router.weight.data = torch.eye(experts, dtype=torch.float64)
        x_TH = torch.tensor([LOGITS], dtype=torch.float64, requires_grad=True)
        routing = router(x_TH)
        (gradient,) = torch.autograd.grad(routing.gates_Tk[0, 0], x_TH)
        found.append({
            "experts": routing.experts_Tk[0].tolist(),
            "gates": routing.gates_Tk[0].tolist(),
            "gradient": gradient[0].tolist(),
        })  # fmt: skip
    return found
