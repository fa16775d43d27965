# python snippets/lc5/one_f_one_b.py
from xtrain.schedules import gpipe, one_f_one_b, render_text, simulate

print(render_text(simulate(one_f_one_b(3, 4))))

for micro_batches in (4, 8, 64):
    for make in (gpipe, one_f_one_b):
        timeline = simulate(make(4, micro_batches))
        held = [int(peak) for peak in timeline.peak_activations]
        print(f"{make.__name__:12} step {timeline.makespan:3g}, held by ranks {held}")
