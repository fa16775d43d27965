# python snippets/lc7/balance.py
import torch

from xtrain.expert_parallel import TopKRouter

torch.manual_seed(0)
router = TopKRouter(16, num_experts=4, top_k=1, score="sigmoid", balance_bias=True)
common = torch.randn(16)
router.weight.data[2] += 0.05 * common  # expert 2 likes what all tokens share

for step in range(201):
    routing = router(common + torch.randn(1000, 16))
    if step in (0, 10, 50, 200):
        loss = router.stats.load_balancing_loss.item()
        bias = [round(b, 2) for b in router.balance_bias.tolist()]
        loads = routing.counts_E.tolist()
        print(f"step {step}: loads {loads}, bias {bias}, balance loss {loss:.2f}")
    router.update_balance_bias(routing.counts_E, rate=0.01)
