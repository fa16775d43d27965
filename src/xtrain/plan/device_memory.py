"""Bytes on a device during a step, by what they hold: states, activations, buffers.

                       at rest   end of forward   end of backward   in the optimizer
    weights, optimizer    x            x                 x                  x
    gradients            kept      of earlier            x                  x
    activations                   all in flight
    logits                        the last stage
    gathered weights              blocks, root       block, root
    update                                                                  x

Which micro-batches are in flight depends on the schedule and the pipeline rank: 1F1B
holds p - r of them on rank r, GPipe all. ZeRO divides the states; stage 3 gathers the
weights of the block that computes, of the next one (prefetched), and of the root
(embedding, norm, head); without `reshard_after_forward` those of all blocks stay until
their backward.

Sources: Rajbhandari et al., ZeRO, 2020, section 5; Korthikanti et al., 2022, section 4;
Narayanan et al., 2021, section 2.2; torch's FSDP2 (what is gathered when).
"""

from dataclasses import dataclass, fields, replace

from xtrain.plan.activations import HALF, activation_memory, layer_activations
from xtrain.plan.bubble import interleaved_activations, pipeline_activations
from xtrain.plan.checks import require_one_of
from xtrain.plan.layout import DeviceParameters, Layout, device_parameters
from xtrain.plan.memory import Recipe, recipe_of, state_memory
from xtrain.plan.shapes import ModelShape

LOGIT_BYTES = 10
"""A bf16 logit, its fp32 copy and the fp32 gradient."""
PHASES = ("at rest", "end of forward", "end of backward", "in the optimizer")
FORMULAS = ("fused", "unfused")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device, by what they hold."""

    weights: float = 0.0
    gradients: float = 0.0
    main_gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    live_layer: float = 0.0
    """All activations of the layer that is recomputed."""
    logits: float = 0.0
    gathered: float = 0.0
    """Unsharded blocks: of weights, and one of gradients."""
    root: float = 0.0
    """Embedding, norm and head that stage 3 has gathered."""
    update: float = 0.0
    """Temporary buffers of the optimizer."""

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer state."""
        gradients = self.gradients + self.main_gradients
        return self.weights + gradients + self.master + self.moments

    @property
    def total(self) -> float:
        temporary = self.gathered + self.root + self.update
        kept = self.activations + self.live_layer + self.logits
        return self.states + kept + temporary

    def parts(self) -> dict[str, float]:
        """Bytes by name, in the order above."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


LayerBytes = tuple[tuple[float, float, float], tuple[float, float, float]]


def memory_per_device(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    *,
    rank: int = 0,
    recipe: str | Recipe = "megatron18",
    formula: str = "fused",
    logit_bytes: int = LOGIT_BYTES,
) -> DeviceMemory:
    """Everything a device of pipeline rank `rank` holds while it computes.

    That is the end of forward with the gradients of earlier micro-batches.

    Args:
        sequence: tokens of one sequence, before context ranks divide it.
        recipe: bytes per parameter, a name of `RECIPES` or your own.
        formula: "fused" (`layer_activations`) or "unfused" (`activation_memory`).
        logit_bytes: of one logit, with its copy and gradient.
    """
    held = device_parameters(shape, layout, rank)
    layers = layer_bytes(shape, layout, sequence, formula)
    return DeviceMemory(
        *state_bytes(held, layout, recipe),
        *activation_bytes(shape, layout, sequence, held, rank, layers, logit_bytes),
        *gathered_bytes(held, layout, recipe),
    )


def state_bytes(
    held: DeviceParameters, layout: Layout, recipe: str | Recipe
) -> tuple[float, float, float, float, float]:
    """Weights, gradients, main gradients, master, moments: dense ones and experts."""
    kind = recipe_of(recipe)
    dense = state_memory(held.dense, layout.shard_ranks, layout.zero, kind)
    weights, gradients, optimizer = dense.weights, dense.gradients, dense.optimizer
    if held.experts:
        ranks = layout.expert_shard_ranks
        experts = state_memory(held.experts, ranks, layout.zero, kind)
        weights += experts.weights
        gradients += experts.gradients
        optimizer += experts.optimizer
    if layout.reduce_at_end:
        gradients = held.total * kind.gradients
    if layout.offload:
        optimizer = 0
    main = gradients * kind.main_gradient / (kind.gradients or 1)
    master = optimizer * kind.master / (kind.optimizer or 1)
    return weights, gradients - main, main, master, optimizer - master


def held_micro_batches(layout: Layout, rank: int = 0) -> float:
    """Micro-batches whose activations a rank holds at most, over all its layers."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if layout.schedule == "one_f_one_b":
        return min(m, p - rank)
    if layout.schedule == "interleaved":
        return interleaved_activations(p, m, v, rank)
    return min(m, pipeline_activations(layout.schedule, p, m, v))


def activation_bytes(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    held: DeviceParameters,
    rank: int,
    layers: LayerBytes,
    logit_bytes: int = LOGIT_BYTES,
) -> tuple[float, float, float]:
    """Kept by all micro-batches in flight; one layer's that is recomputed; logits.

    Args:
        layers: what `layer_bytes` returns.
    """
    plain, moe = layers
    again = layout.recomputed_share(held.dense_layers + held.moe_layers)
    whole = held.dense_layers * (again * plain[0] + (1 - again) * plain[2])
    whole += held.moe_layers * (again * moe[0] + (1 - again) * moe[2])
    logits = 0.0
    if layout.stages - 1 in layout.stages_of(rank):
        whole += head_bytes(shape, layout, sequence)
        tokens = layout.micro_batch * sequence // layout.context
        logits = tokens * shape.vocab_size / layout.tensor * logit_bytes
    if layout.schedule in ("dualpipe", "chimera"):
        whole /= 2  # it holds two stages, and counts micro-batches of one
    live = moe[1] if held.moe_layers else plain[1]
    return whole * held_micro_batches(layout, rank), live, logits


def layer_bytes(
    shape: ModelShape, layout: Layout, sequence: int, formula: str = "fused"
) -> LayerBytes:
    """Of a layer without experts, and of one with: what it keeps, what is alive while
    it is recomputed, and what it keeps if others are recomputed in its place."""
    require_one_of("formula", formula, FORMULAS)
    full = layout.recompute == "full"
    found = []
    for layer in (0, shape.num_hidden_layers - 1):
        modes = (layout.recompute, "none", "selective") if full else (layout.recompute,)
        sizes = [_one_layer(shape, layout, sequence, layer, m, formula) for m in modes]
        found.append((sizes[0], sizes[1], sizes[2]) if full else (sizes[0], 0.0, 0.0))
    return found[0], found[1]


def _one_layer(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    layer: int,
    recompute: str,
    formula: str,
) -> float:
    local = sequence // layout.context
    cut = {"tensor": layout.tensor, "sequence_parallel": layout.sequence_parallel}
    if formula == "unfused":
        sizes = local, layout.micro_batch, shape.hidden_size, shape.num_attention_heads
        return activation_memory(*sizes, recompute=recompute, **cut)  # type: ignore[arg-type]
    tokens = layout.micro_batch * local
    return layer_activations(
        shape,
        tokens,
        layer=layer,
        recompute=recompute,
        **cut,  # type: ignore[arg-type]
    ).total


def head_bytes(shape: ModelShape, layout: Layout, sequence: int) -> float:
    """What goes into the last norm and the head, kept for backward."""
    tokens = layout.micro_batch * sequence // layout.context
    share = layout.tensor if layout.sequence_parallel else 1
    return 2 * HALF * tokens * shape.hidden_size / share


def gathered_bytes(
    held: DeviceParameters, layout: Layout, recipe: str | Recipe
) -> tuple[float, float]:
    """Unsharded buffers of ZeRO: blocks, and the root."""
    kind = recipe_of(recipe)
    reduced = kind.gradient or kind.main_gradient
    if layout.zero < 2:
        return 0.0, 0.0
    block = held.block * reduced  # a block's gradients, before they are scattered
    if layout.reduce_at_end:
        block = 0  # all of them are whole
    if layout.zero == 2:
        return block, 0.0
    weights = 2 * held.block
    if not layout.reshard_after_forward:
        weights = held.total - held.root
    return block + weights * kind.weight, held.root * kind.weight


def memory_over_step(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    *,
    rank: int = 0,
    recipe: str | Recipe = "megatron18",
    formula: str = "fused",
) -> dict[str, DeviceMemory]:
    """`DeviceMemory` in each of `PHASES`.

    Gradients are freed after the step, but main gradients are a buffer that stays. The
    optimizer reads 16-bit gradients through an fp32 copy of its shard.
    """
    kind = recipe_of(recipe)
    whole = memory_per_device(
        shape, layout, sequence, rank=rank, recipe=kind, formula=formula
    )
    states = {name: whole.parts()[name] for name in
              ("weights", "main_gradients", "master", "moments")}  # fmt: skip
    rest = DeviceMemory(**states)
    first = layout.micro_batches == 1  # no gradients of earlier micro-batches
    after = replace(rest, gradients=whole.gradients)
    freed = replace(layout, reshard_after_forward=True)  # each block in its backward
    gathered, root = gathered_bytes(device_parameters(shape, freed, rank), freed, kind)
    copied = kind.gradient and kind.gradient < 4 and not kind.main_gradient
    shard = whole.moments / kind.moments if kind.moments else 0.0
    return {
        "at rest": rest,
        "end of forward": replace(whole, gradients=0.0) if first else whole,
        "end of backward": replace(after, gathered=gathered, root=root),
        "in the optimizer": replace(after, update=4.0 * shard if copied else 0.0),
    }


def pipeline_positions(layout: Layout) -> dict[str, int]:
    """Pipeline ranks that differ: "first", "middle" and "last", as far as there are."""
    last = layout.pipeline - 1
    found = {"first": 0}
    if last > 1:
        found["middle"] = 1
    if last:
        found["last"] = last
    return found


def verdict(needed: float, capacity: float, reserve: float) -> str:
    """ "fits", "tight" (into what should stay free) or "does not fit"."""
    if needed <= capacity - reserve:
        return "fits"
    return "tight" if needed <= capacity else "does not fit"
