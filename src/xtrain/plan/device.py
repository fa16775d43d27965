"""What one device holds of the model: parameters by part, tensor cuts, experts.

    pipeline rank 0          middle ranks        last rank
    embedding / t            layers              layers
    layers                                       norm, head / t

    of a layer    matrices / t       norms and router whole       experts / (expert x t)

A tied head is the embedding once more: on one rank nothing, on a pipeline a copy of its
own on the last one. A rank with several virtual stages holds them all; schedules that
run both ways hold two.

Symbols: t tensor ranks.
"""

from dataclasses import dataclass

from xtrain.plan.layout import Layout, layers_of_stage
from xtrain.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class DeviceParameters:
    """Elements on one device, by part."""

    embedding: int
    layers: int
    """Without routed experts."""
    experts: int
    head: int
    """With the norm before it."""
    dense_layers: int
    """How many layers without experts it holds."""
    moe_layers: int
    block: int
    """The largest layer's elements."""

    @property
    def dense(self) -> int:
        """What ZeRO shards over all data ranks: everything but routed experts."""
        return self.embedding + self.layers + self.head

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def root(self) -> int:
        """What no layer holds: embedding, norm and head."""
        return self.embedding + self.head


def device_parameters(
    shape: ModelShape, layout: Layout, rank: int = 0
) -> DeviceParameters:
    """What each device of pipeline rank `rank` holds."""
    stages = layout.stages_of(rank)
    layers = [
        layer
        for stage in stages
        for layer in layers_of_stage(shape.num_hidden_layers, layout.stages, stage)
    ]
    moe = sum(shape.is_moe(layer) for layer in layers)
    last = shape.num_hidden_layers - 1
    plain = layer_on_device(shape, layout, 0)
    expert_layer = layer_on_device(shape, layout, last)
    table = -(-shape.vocab_size // layout.tensor) * shape.hidden_size
    embedding = table + shape.position_table if 0 in stages else 0
    head = 0
    if layout.stages - 1 in stages:
        tied = shape.tie_word_embeddings and 0 in stages
        head = shape.last_norm + (0 if tied else table)
    return DeviceParameters(
        embedding=embedding,
        layers=(len(layers) - moe) * plain[0] + moe * expert_layer[0],
        experts=moe * expert_layer[1],
        head=head,
        dense_layers=len(layers) - moe,
        moe_layers=moe,
        block=sum(expert_layer if moe else plain),
    )


def layer_on_device(shape: ModelShape, layout: Layout, layer: int) -> tuple[int, int]:
    """Elements of a layer on one device: without its routed experts, and of those.

    Key heads fewer than tensor ranks stand on several of them.
    """
    experts = shape.experts_of_layer(layer)
    whole = shape.replicated_of_layer(layer)
    cut = shape.parameters_of_layer(layer) - whole - experts
    keys = shape.num_key_value_heads
    again = 0
    if layout.tensor > keys:
        again = 2 * shape.head_dim * shape.hidden_size * (layout.tensor - keys)
    held = -(-(cut + again) // layout.tensor) + whole
    return held, experts // (layout.tensor * layout.expert)
