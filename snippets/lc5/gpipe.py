# python snippets/lc5/gpipe.py
from xtrain.schedules import gpipe, render_text, simulate

print(render_text(simulate(gpipe(3, 4))))

for micro_batches in (1, 4, 16, 64):
    timeline = simulate(gpipe(4, micro_batches))
    held = max(timeline.peak_activations)
    print(
        f"4 ranks, {micro_batches:2} micro-batches: idle {max(timeline.idle):g}, "
        f"{timeline.idle_fraction:.1%} of the step; {held:g} held"
    )
