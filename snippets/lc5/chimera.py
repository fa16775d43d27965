# python snippets/lc5/chimera.py
from xtrain.schedules import SCHEDULES, render_text, simulate

print(render_text(simulate(SCHEDULES["chimera"](4, 4))))

for name in ("one_f_one_b", "chimera"):
    for micro_batches in (4, 8, 32):
        timeline = simulate(SCHEDULES[name](4, micro_batches))
        held = [int(peak) for peak in timeline.peak_activations]
        print(
            f"{name:11} {micro_batches:2} micro-batches: idle {max(timeline.idle):2g}, "
            f"{timeline.idle_fraction:.1%}; held {held}, "
            f"{timeline.parameter_copies} copies"
        )
