"""The rules that a layout has to keep.

`broken_rules` lists which rules a layout breaks for a model, each by name and with the
numbers; a layout without any is legal. Memory and speed are checked
elsewhere.

Sources: Rajbhandari et al., ZeRO, 2020; DeepSpeed's pipeline engine, which refuses
stages 2 and 3.
"""

from collections.abc import Iterator
from typing import NamedTuple

from xtrain.plan.checks import require_whole
from xtrain.plan.layout import CHUNKS, Layout
from xtrain.plan.shapes import ModelShape


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
        gpus: devices; any number unless given.
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
        *_copies(layout),
    ]
    each = layout.zero > 1 and not layout.reduce_at_end
    if each and layout.pipeline > 1 and not sharded_pipeline:
        found.append(
            Broken(
                "zero-with-pipeline",
                f"zero={layout.zero} with pipeline={layout.pipeline}: every micro-"
                f"batch would reduce its gradients; pipeline engines stop at stage 1, "
                f"or keep whole gradients until the last one (reduce_at_end=True)",
            )
        )
    return found


def check_layout(
    shape: ModelShape, layout: Layout, sequence: int, **options: object
) -> None:
    """ValueError with every rule that `broken_rules` finds."""
    broken = broken_rules(shape, layout, sequence, **options)  # type: ignore[arg-type]
    if broken:
        found = "; ".join(f"{rule}: {why}" for rule, why in broken)
        raise ValueError(f"{layout} breaks rules: {found}")


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
    }
    if not layout.folded:
        inner = shape.moe_intermediate_size
        lengths["expert-intermediate"] = ("moe_intermediate_size", inner or 0)
    for rule, (name, length) in lengths.items():
        if length % tensor:
            yield Broken(rule, f"{name}={length} is not divisible by tensor={tensor}")
    vocabulary, keys = shape.vocab_size, shape.num_key_value_heads
    if vocabulary % tensor:
        padded = padded_vocabulary(vocabulary, tensor)
        yield Broken(
            "vocabulary",
            f"vocab_size={vocabulary} is not divisible by tensor={tensor}: pad it, for "
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
            f"{local} tokens of a context rank are not divisible by tensor={tensor}",
        )


def _context(shape: ModelShape, layout: Layout, sequence: int) -> Iterator[Broken]:
    context = layout.context
    if context == 1:
        return
    if sequence % (2 * context):
        yield Broken(
            "sequence",
            f"sequence={sequence} is not divisible by 2 x context={context}: each rank "
            f"takes two pieces, so that the mask leaves all the same work",
        )
    heads = shape.num_attention_heads // layout.tensor
    if layout.context_way == "ulysses" and heads % context:
        yield Broken(
            "ulysses-heads",
            f"{heads} heads of a tensor rank are not divisible by context={context}",
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
            "experts",
            f"num_local_experts={experts} is not divisible by expert={expert}",
        )
    ranks = layout.data * layout.context * layout.tensor
    if layout.folded and ranks % (expert * layout.expert_cut):
        yield Broken(
            "expert-axis",
            f"expert={expert} x expert_tensor={layout.expert_cut} does not divide the "
            f"{ranks} ranks of data x context x tensor",
        )
    if not layout.folded and layout.data % expert:
        yield Broken(
            "expert-axis",
            f"expert={expert} does not divide data={layout.data}, whose ranks it "
            f"takes: choose a divisor, or expert_tensor=1 to take tensor ranks, too",
        )


def _copies(layout: Layout) -> Iterator[Broken]:
    ranks = layout.data * (layout.context if layout.shard_context else 1)
    if ranks % layout.replicate:
        yield Broken(
            "replicate",
            f"replicate={layout.replicate} does not divide the {ranks} ranks that "
            f"ZeRO shards over",
        )
    if layout.recomputed_layers is not None and layout.recompute != "full":
        yield Broken(
            "recomputed-layers",
            f"recomputed_layers={layout.recomputed_layers} with "
            f"recompute={layout.recompute!r}: it counts layers of recompute='full'",
        )
    if layout.reduce_at_end and layout.zero < 2:
        yield Broken(
            "reduce-at-end",
            f"reduce_at_end=True with zero={layout.zero}: it is for stages 2 and 3, "
            f"which would reduce after every micro-batch",
        )
    if layout.replicate > 1 and not layout.zero:
        yield Broken(
            "replicate", f"replicate={layout.replicate} with zero=0: no shards"
        )
