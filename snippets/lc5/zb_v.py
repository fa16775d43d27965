# python snippets/lc5/zb_v.py
from xtrain.schedules import render_text, simulate, zb_v

schedule = zb_v(2, 4)
print(render_text(simulate(schedule)))
print("stages of the ranks:", [schedule.stages_of(rank) for rank in range(2)])

for times in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
    timeline = simulate(zb_v(4, 8), *times)
    idle = [round(t, 2) for t in timeline.idle]
    print("F, B, W =", *times, "idle", idle, "held", timeline.peak_activations)
