# python snippets/lc5/zero_bubble.py
from xtrain.schedules import SCHEDULES, render_text, simulate

print(render_text(simulate(SCHEDULES["zb_h2"](3, 6))))

for times in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
    print("F, B, W =", *times)
    for name in ("one_f_one_b", "zb_h1", "zb_h2"):
        timeline = simulate(SCHEDULES[name](8, 24), *times)
        print(
            f"  {name:11} idle {max(timeline.idle):4.1f}, step {timeline.makespan:4.1f}"
        )

for name in ("one_f_one_b", "zb_h1", "zb_h2"):
    timeline = simulate(SCHEDULES[name](8, 24))
    until_b = [int(peak) for peak in timeline.peak_activations]
    until_w = [int(peak) for peak in timeline.peak_until_weights]
    print(f"{name:11} held until B: {until_b}")
    print(f"{'':11}      until W: {until_w}")
