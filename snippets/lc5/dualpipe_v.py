# python snippets/lc5/dualpipe_v.py
from xtrain.schedules import dualpipe, dualpipe_v, simulate

both, half = dualpipe(8, 20), dualpipe_v(4, 10)
for schedule in (both, half):
    timeline = simulate(schedule)
    stages = [schedule.stages_of(rank) for rank in range(4)]
    print(f"{schedule.name}: ranks 0 to 3 hold {stages}")
    print(f"  idle {timeline.idle[:4]}, weights: {schedule.parameter_copies} times")

kinds = [
    [[part.kind for part in action.parts] for action in schedule.actions[1]]
    for schedule in (both, half)
]
print("rank 1 does the same kinds of actions in the same order:", kinds[0] == kinds[1])
