# %% [markdown]
# # Lab: where do 112 GB go?
#
# A model of seven billion parameters takes 14 GB as bf16 weights, and still does not
# train on a GPU of 80 GB. This lab counts what a training step keeps, shows which part
# each stage of ZeRO divides, and measures the count on a real model. Everything below ran
# when this page was built. Download the file with the button at the end and change it.

# %%
from xtrain.plan import RECIPES, ModelShape, state_memory

shape = ModelShape.preset("llama-2-7b")
recipe = RECIPES["zero16"]
print(f"{shape.parameters:,} parameters")
for name in ("weight", "gradients", "master", "moments"):
    size = getattr(recipe, name)
    print(f"{name:10} {size:2} bytes each  {size * shape.parameters / 1e9:6.1f} GB")
print(
    f"{'together':10} {recipe.total:2} bytes each  {recipe.total * shape.parameters / 1e9:6.1f} GB"
)

# %% [markdown]
# Weights and gradients are small beside the optimizer: its fp32 copy of the weights and
# Adam's two moments are three quarters of the bytes. For exactly seven billion
# parameters the sum is the 112 GB of the title:

# %%
from xtrain.plan import zero_memory

assert zero_memory(7 * 10**9, 1, 0) == 112 * 10**9
print(zero_memory(7 * 10**9, 1, 0) / 1e9, "GB")

# %% [markdown]
# ## What each stage divides
#
# ZeRO-1 divides the optimizer's part among the ranks, ZeRO-2 the gradients too, ZeRO-3
# the weights as well.

# %%
print("GB per GPU      weights gradients optimizer    total")
for ranks in (8, 64):
    for stage in (0, 1, 2, 3):
        held = state_memory(shape.parameters, ranks, stage)
        parts = (held.weights, held.gradients, held.optimizer, held.total)
        print(
            f"{ranks:2} GPUs, ZeRO-{stage}", *(f"{part / 1e9:9.2f}" for part in parts)
        )

# %% [markdown]
# ZeRO-1 alone brings the model onto the GPU. What is left for activations grows with
# each further stage, but less and less: on many GPUs the weights and gradients that
# ZeRO-1 leaves whole are nearly all that remains.
#
# ## Measured on a real model
#
# The formula is about bytes, so it can be weighed: a small model of this package, one
# step of Adam in fp32, and the sizes of all tensors that are there afterwards. fp32
# needs no second copy of the weights, so it costs as much per parameter as mixed
# precision does.

# %%
import torch

from xtrain.model import XtrainConfig, XtrainModel

config = XtrainConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = XtrainModel(config)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 96, (2, 16))
model(tokens, labels=tokens).backward()
optimizer.step()


def held(tensors) -> int:
    """Bytes of tensors of more than one element; Adam's step counters are single numbers."""
    return sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


weights = held(model.parameters())
gradients = held(p.grad for p in model.parameters())
moments = held(t for state in optimizer.state.values() for t in state.values())
print(f"weights {weights:,}, gradients {gradients:,}, moments {moments:,} bytes")
print((weights + gradients + moments) / config.parameters, "bytes per parameter")
assert weights + gradients + moments == zero_memory(config.parameters, 1, 0, "fp32")

# %% [markdown]
# ## Try it
#
# - Use the recipe `megatron18`, which sums gradients in fp32. How many bytes does each
#   parameter cost now, and which stage helps most?
# - From how many GPUs on does a model of 70 billion parameters fit into 80 GB with each
#   stage, before any activation?
# - Freeze the embedding in the measured model. Which of the four parts shrink?
