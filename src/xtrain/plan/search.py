"""All layouts of a model on a number of devices: legal ones ranked, others by rule.

    every way to write devices = tensor x pipeline x context x data
      x experts' axis (of data ranks, or of tensor, context and data ranks)
      x ZeRO stage (over all ranks, or over a node's with copies)  x  recomputation
      x sequences of a micro-batch  x  schedule

Of layers that are recomputed whole, there are as few as memory asks for. A layout that
breaks a rule is counted under the rule's name, with one example; so is one that does
not fit into memory. The others are ranked by the seconds of a step; those that are
tight in memory come after those that fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_one_of, require_whole
from xtrain.plan.estimate import GIB, Assumptions, Estimate, Estimator
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import SCHEDULE_NAMES, Layout
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.shapes import ModelShape

MEMORY = "memory"
NEEDLESS = "selective recomputation fits as well, and takes no longer"
MOST_GPUS, MOST_LAYOUTS = 1_000_000, 300_000
"""A search in Python takes a fifth of a millisecond for a layout."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Which values are tried; sizes of axes are all that divide the devices."""

    zero: Sequence[int] = (0, 1, 2, 3)
    recompute: Sequence[str] = ("none", "selective", "full")
    micro_batch: Sequence[int] = (1, 2, 4)
    schedules: Sequence[tuple[str, int]] = (
        ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 4),
    )  # fmt: skip
    """(schedule, chunks); models with experts try `dualpipe`, too."""
    replicate: Sequence[int] = (1,)
    """Copies that hybrid sharding keeps, for stage 3."""
    offload: Sequence[bool] = (False,)
    """Whether the optimizer's state is in the host's memory."""
    tensor: Sequence[int] = ()
    """All that divide the devices, if empty; so are the next three."""
    pipeline: Sequence[int] = ()
    context: Sequence[int] = ()
    expert: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, known in (
            ("zero", (0, 1, 2, 3)),
            ("recompute", RECOMPUTE),
            ("schedules", SCHEDULE_NAMES),
        ):
            for value in getattr(self, name):
                plain = value[0] if name == "schedules" else value
                require_one_of(name, plain, known)
        for name in ("micro_batch", "tensor", "pipeline", "context", "expert",
                     "replicate"):  # fmt: skip
            for size in getattr(self, name):
                require_whole(name, size)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Layouts that one rule excludes: how many, and one of them with its reason."""

    rule: str
    count: int
    example: str
    why: str


@dataclass(slots=True)
class SearchResult:
    """Legal layouts that fit, fastest first; and the rest by the rule they break."""

    found: list[Estimate]
    rejected: list[Rejected]
    tried: int
    estimated: int
    """Legal ones: their memory, and the seconds of those that fit."""

    @property
    def best(self) -> Estimate | None:
        return self.found[0] if self.found else None


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def candidates(
    shape: ModelShape,
    gpus: int,
    batch: int,
    space: SearchSpace = SearchSpace(),
    **fixed: Any,
) -> Iterator[Layout]:
    """Every layout of `gpus` devices and `batch` sequences in `space`.

    Layouts that break a rule are included, except axes whose product is not `gpus` and
    batches that do not divide. Stage 2 in a pipeline reduces gradients at the end,
    which costs what stage 1 does: it is tried where stage 1 is not.
    """
    for data, tensor, pipeline, context in splits(gpus, space):
        shared = data * context
        choices = choices_of(shape, (data, tensor, pipeline, context), space)
        for (expert, cut), zero, recompute, size, way, copies, away in product(
            *choices
        ):
            micro_batches, rest = divmod(batch, data * size)
            if rest or not micro_batches or (zero and shared == 1):
                continue
            if copies > 1 and (zero < 3 or shared % copies):
                continue
            yield Layout(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                expert=expert,
                expert_tensor=cut,
                zero=zero,
                sequence_parallel=tensor > 1,
                micro_batch=size,
                micro_batches=micro_batches,
                schedule=way[0],
                chunks=way[1],
                recompute=recompute,
                shard_context=context > 1,
                replicate=copies,
                offload=away,
                reduce_at_end=zero == 2 and pipeline > 1 and 1 not in space.zero,
                **fixed,
            )


def splits(gpus: int, space: SearchSpace) -> Iterator[tuple[int, int, int, int]]:
    """(data, tensor, pipeline, context) of every way to write `gpus` as a product."""
    sizes = divisors(gpus)
    for tensor in space.tensor or sizes:
        for pipeline in space.pipeline or sizes:
            if gpus % (tensor * pipeline):
                continue
            for context in space.context or sizes:
                data, rest = divmod(gpus, tensor * pipeline * context)
                if not rest:
                    yield data, tensor, pipeline, context


def choices_of(
    shape: ModelShape, sizes: tuple[int, int, int, int], space: SearchSpace
) -> tuple[Sequence[Any], ...]:
    """What is multiplied: expert ranks, ZeRO stages, recomputation and so on."""
    data, tensor, pipeline, context = sizes
    experts: list[tuple[int, int | None]] = [(one, None) for one in space.expert]
    schedules = [*space.schedules] if pipeline > 1 else [("one_f_one_b", 1)]
    if not shape.num_local_experts:
        experts = experts or [(1, None)]
    else:
        plain = space.expert or divisors(data)
        experts = [(one, None) for one in plain]
        folded = space.expert or divisors(data * tensor * context)
        if tensor > 1:  # whole experts, on ranks of all three axes, if data has too few
            experts += [(one, 1) for one in folded if one > 1 and data % one]
        if pipeline > 1 and space.schedules == SearchSpace().schedules:
            schedules.append(("dualpipe", 1))
    return (experts, space.zero, space.recompute, space.micro_batch, schedules,
            space.replicate, space.offload)  # fmt: skip


def check_count(shape: ModelShape, gpus: int, space: SearchSpace) -> None:
    """ValueError for a search that would take minutes."""
    if gpus > MOST_GPUS:
        raise ValueError(f"gpus={gpus} is above {MOST_GPUS}")
    count = 0
    for sizes in splits(gpus, space):
        count += prod(map(len, choices_of(shape, sizes, space)))
        if count > MOST_LAYOUTS:
            raise ValueError(
                f"gpus={gpus} have more than {MOST_LAYOUTS} layouts: fix the size of "
                f"an axis (tensor, pipeline, context, expert)"
            )


def search(
    shape: ModelShape,
    accelerator: Accelerator | str,
    gpus: int,
    sequence: int,
    batch: int,
    *,
    space: SearchSpace = SearchSpace(),
    assumptions: Assumptions = Assumptions(),
    **fixed: Any,
) -> SearchResult:
    """Try every layout of `candidates`.

    Args:
        batch: sequences of a step, all devices together.
        fixed: other fields of `Layout`, the same for all.

    Raises:
        ValueError: a size is not a whole number above 0, or no batch divides so.
    """
    for name, size in (("gpus", gpus), ("sequence", sequence), ("batch", batch)):
        require_whole(name, size)
    check_count(shape, gpus, space)
    estimator = estimator_of(shape, accelerator, sequence, assumptions)
    found: list[Estimate] = []
    counts: dict[str, list[Any]] = {}
    tried = estimated = 0
    allowed = assumptions.sharded_pipeline
    for layout in candidates(shape, gpus, batch, space, **fixed):
        tried += 1
        broken = broken_rules(shape, layout, sequence, sharded_pipeline=allowed)
        if broken:
            counted(counts, layout, *broken[0])
            continue
        if layout.recompute == "full" and estimator.room(layout) >= 0:
            cheap = replace(layout, recompute="selective")
            if "selective" in space.recompute and estimator.room(cheap) >= 0:
                counted(counts, layout, "recompute", NEEDLESS)
                continue
            layout = estimator.fewest_recomputed(layout)
        estimated += 1
        memory, position = estimator.fullest(layout)
        if memory.total > estimator.capacity:
            why = (
                f"{memory.total / GIB:.1f} GiB on the {position} rank, and a device "
                f"has {estimator.capacity / GIB:.1f}"
            )
            counted(counts, layout, MEMORY, why)
        else:
            found.append(estimator.estimate(layout, (memory, position)))
    if not tried:
        raise ValueError(
            f"batch={batch} sequences cannot be divided over {gpus} devices in any "
            f"layout of this space"
        )
    found.sort(key=lambda one: (one.verdict != "fits", one.seconds))
    rejected = [Rejected(rule, *counted) for rule, counted in counts.items()]
    rejected.sort(key=lambda one: -one.count)
    return SearchResult(found, rejected, tried, estimated)


@lru_cache(maxsize=1)
def estimator_of(*arguments: Any) -> Estimator:
    """The next search of the same model and device reuses its times."""
    return Estimator(*arguments)


def counted(counts: dict[str, list[Any]], layout: Layout, rule: str, why: str) -> None:
    """One more that the rule excludes; the first of them is the example."""
    if rule not in counts:
        counts[rule] = [0, str(layout), why]
    counts[rule][0] += 1
