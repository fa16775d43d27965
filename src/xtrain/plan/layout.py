"""How a step is laid out over devices: sizes of the axes, and what each device holds.

    mesh, outermost first    pipeline  x  data  x  context  x  tensor  =  devices
                                          data  =  expert_data  x  expert

    neighbours of the tensor axis are neighbours in a node; the pipeline axis is the
    widest apart

    pipeline rank 0          middle ranks        last rank
    embedding / t            layers              layers
    layers                                       norm, head / t

    of a layer    matrices / t       norms and router whole       experts / (expert x t)

A tied head is the embedding once more: on one rank nothing, on a pipeline a copy of its
own on the last one. A rank with several virtual stages holds them all; schedules that
run both ways hold two.

Which layouts a model can have is in `xtrain.plan.layout_rules`.

Source: Narayanan et al., 2021 (how the axes go together). Symbol: t tensor ranks.
"""

from dataclasses import dataclass
from math import gcd

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_one_of, require_whole
from xtrain.plan.context_parallel import WAYS
from xtrain.plan.shapes import ModelShape

CHUNKS = {"interleaved": 0, "zb_v": 2, "dualpipe_v": 2}  # parts a rank; 0: any
PLACEMENTS = {"zb_v": "v", "dualpipe_v": "v", "dualpipe": "mirror", "chimera": "mirror"}
SCHEDULE_NAMES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v",
                  "chimera", "dualpipe", "dualpipe_v")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, and what else decides memory, bytes and time of a step."""

    data: int = 1
    """Ranks with batches of their own; `expert` divides it."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    """Stage: 1 shards the optimizer's state, 2 gradients too, 3 weights too."""
    sequence_parallel: bool = False
    """Activations between the matrices are cut over the tensor ranks."""
    micro_batch: int = 1
    """Sequences that go through the model together."""
    micro_batches: int = 1
    """Of a step, one after the other."""
    schedule: str = "one_f_one_b"
    chunks: int = 1
    """Virtual stages a rank."""
    recompute: str = "none"
    """What backward computes again: "none", "selective" (what is cheap), "full"."""
    recomputed_layers: int | None = None
    """Of "full": only so many layers of a pipeline rank, the others "selective"."""
    context_way: str = "ring"
    reshard_after_forward: bool = True
    """Stage 3 frees gathered weights after forward, and gathers them once more."""
    shard_context: bool = False
    """ZeRO shards over data x context (Megatron, torchtitan), not over data alone."""
    reduce_at_end: bool = False
    """Stages 2 and 3 keep whole gradients until the last micro-batch (torch's
    `set_requires_gradient_sync`), as Llama 3 did in its pipeline with stage 2."""
    offload: bool = False
    """The optimizer's state is in the host's memory, and so is its step."""
    replicate: int = 1
    """Copies of what ZeRO shards: hybrid sharding over neighbours, sums over copies."""
    expert_tensor: int | None = None
    """Ranks that cut one expert; `tensor` unless given. With fewer, expert ranks are
    taken of tensor x context x data (Megatron's parallel folding)."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "chunks",
                     "micro_batch", "micro_batches"):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                require_whole(name, value)
        cut = self.expert_tensor
        require_whole("replicate", self.replicate)
        if cut is not None:
            require_whole("expert_tensor", cut)
        if self.recomputed_layers is not None:
            require_whole("recomputed_layers", self.recomputed_layers)
        for name, known in (
            ("zero", (0, 1, 2, 3)),
            ("schedule", SCHEDULE_NAMES),
            ("recompute", RECOMPUTE),
            ("context_way", WAYS),
        ):
            require_one_of(name, getattr(self, name), known)

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def batch(self) -> int:
        """Sequences of a step, all ranks together."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def recomputed(self) -> str:
        """In words: "full 3" recomputes three layers of each pipeline rank."""
        some = self.recomputed_layers
        return self.recompute if some is None else f"{self.recompute} {some}"

    def recomputed_share(self, layers: float) -> float:
        """Of so many layers on a rank, those that "full" recomputes."""
        if self.recomputed_layers is None or not layers:
            return 1.0
        return min(self.recomputed_layers / layers, 1.0)

    @property
    def stages(self) -> int:
        """Virtual stages that the model is cut into."""
        return self.pipeline * self.chunks

    @property
    def expert_cut(self) -> int:
        """Ranks over which the inner size of an expert is cut."""
        return self.expert_tensor or self.tensor

    @property
    def folded(self) -> bool:
        """Expert ranks are taken of other axes than data."""
        return self.expert_cut != self.tensor

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts; with context ranks apart, unless folded."""
        if self.folded:
            return self.expert_replicas
        return self.data // self.expert

    @property
    def expert_replicas(self) -> int:
        """All ranks that hold the same experts, of a pipeline rank."""
        ranks = self.data * self.context * self.tensor
        return ranks // (self.expert * self.expert_cut)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards what is not an expert."""
        ranks = self.data * (self.context if self.shard_context else 1)
        return ranks // self.replicate

    @property
    def expert_shard_ranks(self) -> int:
        """The same of experts; hybrid sharding keeps whole what it cannot cut."""
        whole = self.shard_context or self.folded
        ranks = self.expert_replicas if whole else self.expert_data
        return max(ranks // gcd(ranks, self.replicate), 1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Virtual stages whose weights this pipeline rank holds."""
        if not 0 <= rank < self.pipeline:
            raise ValueError(f"rank={rank} of pipeline={self.pipeline}")
        placement = PLACEMENTS.get(self.schedule, "loop")
        if placement == "mirror":
            return tuple(sorted({rank, self.pipeline - 1 - rank}))
        if placement == "v":
            return rank, 2 * self.pipeline - 1 - rank
        return tuple(range(rank, self.stages, self.pipeline))

    def __str__(self) -> str:
        names = {"TP": "tensor", "CP": "context", "PP": "pipeline", "DP": "data",
                 "EP": "expert"}  # fmt: skip
        sizes = {short: getattr(self, name) for short, name in names.items()}
        parts = [f"{short}{size}" for short, size in sizes.items() if size > 1]
        zero = f"ZeRO-{self.zero}"
        zero += f"x{self.replicate}" if self.replicate > 1 else ""
        ends = ["offload"] if self.offload else []
        return " ".join([*(parts or ["DP1"]), zero, *ends])


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage; those between the first and the last take what is over.

    The first also has the embedding and the last the head, so they are the last that
    get one layer more.
    """
    each, over = divmod(layers, stages)
    inner = max(stages - 2, 0)
    wide = min(over, inner)  # stages 1 to wide have one more
    wide_last, wide_first = over - wide > 0, over - wide > 1
    start = stage * each + min(max(stage - 1, 0), wide) + (wide_first and stage > 0)
    more = 1 <= stage <= wide or (stage == stages - 1 and wide_last and stages > 1)
    more = more or (stage == 0 and wide_first)
    return range(start, start + each + more)


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
    return held, experts // (layout.expert_cut * layout.expert)
