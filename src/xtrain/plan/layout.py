"""How a step is laid out over devices, and the rules that a layout has to keep.

    mesh, outermost first    pipeline  x  data  x  context  x  tensor  =  devices
                                          data  =  expert_data  x  expert

    neighbours of the tensor axis are neighbours in a node; the pipeline axis is the
    widest apart

`broken_rules` says which rules a layout breaks for a model, each by name and with the
numbers; a layout without any is legal. Whether it fits into memory or is fast are
questions of their own.

Sources: Narayanan et al., 2021 (how the axes go together); Rajbhandari et al., ZeRO,
2020; DeepSpeed's pipeline engine, which refuses stages 2 and 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_whole
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
    context_way: str = "ring"
    reshard_after_forward: bool = True
    """Stage 3 frees gathered weights after forward, and gathers them once more."""
    shard_context: bool = False
    """ZeRO shards over data x context (Megatron, torchtitan), not over data alone."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "chunks",
                     "micro_batch", "micro_batches"):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                require_whole(name, value)
        for name, known in (
            ("zero", (0, 1, 2, 3)),
            ("schedule", SCHEDULE_NAMES),
            ("recompute", RECOMPUTE),
            ("context_way", WAYS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {known}")

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def batch(self) -> int:
        """Sequences of a step, all ranks together."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def stages(self) -> int:
        """Virtual stages that the model is cut into."""
        return self.pipeline * self.chunks

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.data // self.expert

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards what is not an expert."""
        return self.data * (self.context if self.shard_context else 1)

    @property
    def expert_shard_ranks(self) -> int:
        return self.expert_data * (self.context if self.shard_context else 1)

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
        return " ".join([*(parts or ["DP1"]), f"ZeRO-{self.zero}"])


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


class Broken(NamedTuple):
    """A rule that a layout breaks: its name, and why."""

    rule: str
    why: str


def broken_rules(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    *,
    gpus: int | None = None,
    batch: int | None = None,
    sharded_pipeline: bool = False,
) -> list[Broken]:
    """Every rule that `layout` breaks for this model, with the numbers.

    Args:
        sequence: tokens of one sequence.
        gpus: how many devices there are; any number unless given.
        batch: sequences of a step; any number unless given.
        sharded_pipeline: allow ZeRO stages 2 and 3 with a pipeline.
    """
    require_whole("sequence", sequence)
    found = [
        *_sizes(layout, gpus, batch),
        *_tensor(shape, layout, sequence),
        *_context(shape, layout, sequence),
        *_pipeline(shape, layout),
        *_experts(shape, layout),
    ]
    if layout.zero > 1 and layout.pipeline > 1 and not sharded_pipeline:
        found.append(
            Broken(
                "zero-with-pipeline",
                f"zero={layout.zero} with pipeline={layout.pipeline}: every micro-"
                f"batch would reduce its gradients; pipeline engines stop at stage 1",
            )
        )
    return found


def check_layout(
    shape: ModelShape, layout: Layout, sequence: int, **options: object
) -> None:
    """ValueError with every rule that `broken_rules` finds."""
    broken = broken_rules(shape, layout, sequence, **options)  # type: ignore[arg-type]
    if broken:
        said = "; ".join(f"{rule}: {why}" for rule, why in broken)
        raise ValueError(f"{layout} cannot be: {said}")


def _sizes(layout: Layout, gpus: int | None, batch: int | None) -> Iterator[Broken]:
    if gpus is not None and layout.gpus != gpus:
        yield Broken("devices", f"{layout} takes {layout.gpus} devices, not {gpus}")
    if batch is not None and layout.batch != batch:
        yield Broken(
            "batch",
            f"data={layout.data} x micro_batch={layout.micro_batch} x micro_batches="
            f"{layout.micro_batches} are {layout.batch} sequences, not {batch}",
        )


def padded_vocabulary(vocabulary: int, tensor: int, multiple: int = 128) -> int:
    """Rows of a table that can be cut: the next multiple of `multiple` x tensor."""
    unit = multiple * tensor
    return -(-vocabulary // unit) * unit


def _tensor(shape: ModelShape, layout: Layout, sequence: int) -> Iterator[Broken]:
    tensor = layout.tensor
    if tensor == 1:
        return
    lengths = {
        "heads": ("num_attention_heads", shape.num_attention_heads),
        "intermediate": ("intermediate_size", shape.intermediate_size),
        "expert-intermediate": ("moe_intermediate_size", shape.moe_intermediate_size),
    }
    for rule, (name, length) in lengths.items():
        if (length or 0) % tensor:
            yield Broken(rule, f"{name}={length} is no multiple of tensor={tensor}")
    vocabulary, keys = shape.vocab_size, shape.num_key_value_heads
    if vocabulary % tensor:
        padded = padded_vocabulary(vocabulary, tensor)
        yield Broken(
            "vocabulary",
            f"vocab_size={vocabulary} is no multiple of tensor={tensor}: pad it, for "
            f"example to {padded}",
        )
    if keys % tensor and tensor % keys:
        yield Broken(
            "key-heads",
            f"num_key_value_heads={keys} and tensor={tensor}: one divides the other",
        )
    local = sequence // layout.context
    if layout.sequence_parallel and local % tensor:
        yield Broken(
            "sequence-parallel",
            f"{local} tokens of a context rank are no multiple of tensor={tensor}",
        )


def _context(shape: ModelShape, layout: Layout, sequence: int) -> Iterator[Broken]:
    context = layout.context
    if context == 1:
        return
    if sequence % (2 * context):
        yield Broken(
            "sequence",
            f"sequence={sequence} is no multiple of 2 x context={context}: each rank "
            f"takes two pieces, so that the mask leaves all the same work",
        )
    heads = shape.num_attention_heads // layout.tensor
    if layout.context_way == "ulysses" and heads % context:
        yield Broken(
            "ulysses-heads",
            f"{heads} heads of a tensor rank are no multiple of context={context}",
        )


def _pipeline(shape: ModelShape, layout: Layout) -> Iterator[Broken]:
    ranks, count, name = layout.pipeline, layout.micro_batches, layout.schedule
    if layout.stages > shape.num_hidden_layers:
        yield Broken(
            "layers",
            f"{layout.stages} virtual stages of {shape.num_hidden_layers} layers",
        )
    chunks = CHUNKS.get(name, 1)
    if chunks and layout.chunks != chunks:
        yield Broken("chunks", f"{name} has chunks={chunks}, not {layout.chunks}")
    if name == "interleaved" and count % ranks:
        yield Broken(
            "interleaved",
            f"micro_batches={count} are no multiple of pipeline={ranks}",
        )
    if name in ("dualpipe", "chimera") and ranks % 2:
        yield Broken("mirror", f"{name} needs an even pipeline, not {ranks}")
    if name in ("dualpipe", "chimera") and count % 2:
        yield Broken("mirror", f"{name} needs even micro_batches, not {count}")
    if name in ("dualpipe", "dualpipe_v") and count < 2 * ranks:
        yield Broken(
            "dualpipe",
            f"{name} needs micro_batches >= 2 x pipeline = {2 * ranks}, not {count}",
        )


def _experts(shape: ModelShape, layout: Layout) -> Iterator[Broken]:
    expert, experts = layout.expert, shape.num_local_experts
    if expert == 1:
        return
    if not experts:
        yield Broken("experts", f"expert={expert} of a model without experts")
    elif experts % expert:
        yield Broken(
            "experts", f"num_local_experts={experts} is no multiple of expert={expert}"
        )
    if layout.data % expert:
        yield Broken(
            "expert-axis",
            f"expert={expert} does not divide data={layout.data}, whose ranks it takes",
        )
