# python snippets/lc5/zero_bubble.py
from xtrain.schedules import SCHEDULES, render_text, simulate

print(render_text(simulate(SCHEDULES["zb_h2"](3, 6))))

for times in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
    print("F, B, W =", *times)
    for name in ("one_f_one_b", "zb_h1", "zb_h2"):
        timeline = simulate(SCHEDULES[name](8, 24), *times)
        held = [int(peak) for peak in timeline.peak_activations]
        print(
            f"  {name:11} idle {max(timeline.idle):4.1f}, "
            f"step {timeline.makespan:4.1f}, held by ranks {held}"
        )
