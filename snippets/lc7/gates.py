# python snippets/lc7/gates.py
import torch

from xtrain.expert_parallel import TopKRouter

logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]], requires_grad=True)
for score in ("softmax", "sigmoid"):
    for renormalize in (False, True):
        router = TopKRouter(4, 4, top_k=2, score=score, renormalize=renormalize)
        router.weight.data = torch.eye(4)  # the token is its own logits
        gates = router(logits).gates_Tk[0]
        (gradient,) = torch.autograd.grad(gates[0], logits)
        print(f"{score}{', renormalised' if renormalize else ''}:")
        print("  gates", [round(gate, 3) for gate in gates.tolist()])
        print("  gradient of the first", [round(g, 3) for g in gradient[0].tolist()])
