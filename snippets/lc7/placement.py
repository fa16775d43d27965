# python snippets/lc7/placement.py
from xtrain.expert_parallel.expert_placement import plan_placement

loads = [90, 130, 40, 60, 300, 20, 80, 80]  # tokens of eight experts
plan = plan_placement(loads, ranks=4, slots_per_rank=2)
for slots in (2, 3):
    before, plan = plan, plan_placement(loads, ranks=4, slots_per_rank=slots)
    print(f"{slots} slots a rank: the busiest has {plan.slowdown:.2f} times the mean")
    for rank, held in enumerate(plan.experts):
        print(f"  rank {rank}: experts {held}, {plan.load_of_rank[rank]:.0f} tokens")
print(f"expert 4 is on ranks {plan.ranks_of(4)}, its copies go in turn to",
      [plan.rank_for(4, copy) for copy in range(6)])  # fmt: skip
for move in before.moves(plan):
    print(f"rank {move.source} sends expert {move.expert} to rank {move.rank}")
