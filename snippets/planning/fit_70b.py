# python snippets/planning/fit_70b.py
from dataclasses import replace

from xtrain import plan

GiB = 2**30
shape = plan.ModelShape.preset("llama-3-70b")
layout = plan.Layout(
    tensor=8, pipeline=2, data=4, sequence_parallel=True, micro_batches=128
)

for zero in (0, 1):
    for recompute in ("none", "full"):
        chosen = replace(layout, zero=zero, recompute=recompute)
        memory = plan.memory_per_device(shape, chosen, 8192, recipe="megatron18")
        needed = memory.states + memory.activations + memory.live_layer
        said = plan.verdict(needed, 79.2 * GiB, 4 * GiB)
        print(
            f"{chosen}, recompute {recompute}: states {memory.states / GiB:.1f} GiB, "
            f"with activations {needed / GiB:.1f}: {said}"
        )

found = plan.estimate(shape, replace(layout, zero=1), "a100-80gb", 8192)
print(f"a step takes about {found.seconds:.0f} s, MFU {found.mfu:.1%}")
for part, seconds in found.parts.items():
    if seconds > 0.005:
        print(f"    {part:<10} {seconds:7.2f} s")
