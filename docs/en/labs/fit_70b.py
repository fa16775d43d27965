# %% [markdown]
# # Lab: fit 70B on 64 GPUs
#
# A rule of thumb says: 70 billion parameters on 64 GPUs of 80 GB are trained with 8
# tensor, 2 pipeline and 4 data ranks. Does that fit, and is it a good choice? Everything
# below ran when this page was built. Download the file with the button at the end and
# change it.

# %%
from xtrain.plan import Layout, ModelShape, memory_over_step

shape = ModelShape.preset("llama-3-70b")
GIB = 2**30


def held(layout: Layout, sequence: int, recipe: str) -> dict[str, float]:
    """GiB that the first pipeline rank holds in each phase of a step."""
    phases = memory_over_step(shape, layout, sequence, recipe=recipe)
    return {name: memory.total / GIB for name, memory in phases.items()}


rule = {
    "tensor": 8,
    "pipeline": 2,
    "data": 4,
    "micro_batches": 16,
    "sequence_parallel": True,
}
for recipe in ("zero16", "megatron18"):
    print(recipe)
    for phase, size in held(Layout(**rule), 4096, recipe).items():
        print(f"{size:7.1f} GiB  {phase}")

# %% [markdown]
# Two bytes of weights and two of gradients, an fp32 copy and two moments are 16 bytes a
# parameter. A sixteenth of the model costs about 70 GB before a single activation, and
# with gradients summed in fp32 nearly 80 GB. With the activations of two micro-batches
# neither fits. So the rule leaves something out.
#
# ## The missing part: a sharded optimizer
#
# The four data ranks hold the same optimizer state four times. ZeRO-1 gives each of them
# a quarter.

# %%
for zero in (0, 1):
    for sequence in (4096, 8192):
        most = max(held(Layout(**rule, zero=zero), sequence, "megatron18").values())
        fits = "fits" if most < 80e9 / GIB - 4 else "does not fit"
        print(f"ZeRO-{zero}, {sequence} tokens: {most:5.1f} GiB, {fits}")

# %% [markdown]
# Now both lengths fit without recomputation, with 4 GiB left for the runtime.
#
# ## Is it a good choice?
#
# `search` tries every layout of 64 GPUs and estimates the time of a step.

# %%
from xtrain.plan import search

result = search(shape, "a100-80gb", 64, 4096, 1024)
print(f"{result.tried} layouts, {result.estimated} legal, {len(result.found)} fit")
for one in result.found[:5]:
    print(f"{one.seconds:7.1f} s  {one.memory.total / GIB:5.1f} GiB  {one.layout}")
same = [
    one
    for one in result.found
    if (one.layout.tensor, one.layout.pipeline, one.layout.data) == (8, 2, 4)
]
best = same[0]
print(
    f"{best.seconds:7.1f} s  {best.memory.total / GIB:5.1f} GiB  {best.layout}, the rule's best"
)
assert best.seconds >= result.found[0].seconds

# %% [markdown]
# The rule works once the optimizer is sharded, but fewer tensor ranks are faster by this
# estimate: each layer then sends less. An estimate is no measurement; it tells which
# layouts to try first.
#
# ## Try it
#
# - With 32 GPUs, which layouts are left?
# - Let the network between nodes be slower (`Assumptions`). Which axis should stay inside
#   a node?
# - Recompute everything and use the memory for larger micro-batches. Is that faster?
