"""The features of the support matrix: each changes how a training run is set up."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xtrain.comm.collective_choice import RING
from xtrain.pipeline_parallel import checkpoint

from .setup import Setup


@dataclass(frozen=True)
class Feature:
    """A row and a column of the matrix.

    Attributes:
        name: short, as in test ids.
        axis: two features of the same axis are alternatives, never a pair.
        title: as the page names it, Markdown.
        change: sets it up.
    """

    name: str
    axis: str
    title: str
    change: Callable[[Setup], None]


WRAPPERS = {
    "naive": "`NaiveDataParallel`",
    "ddp": "`DistributedDataParallel`",
    "zero1": "`ZeroOptimizer`, stage 1",
    "zero2": "`ZeroOptimizer`, stage 2",
    "fsdp": "`FullyShardedDataParallel`",
    "fsdp_kept": "`FullyShardedDataParallel`, `reshard_after_forward=False`",
}
FEATURES: dict[str, Feature] = {}
INNER = "inner"  # the axis of wrappers that are there already


def feature(
    axis: str, title: str
) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Make a feature of a function, under the function's name."""

    def add(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
        name = change.__name__
        FEATURES[name] = Feature(name, axis, title, change)
        return change

    return add


def prepare(case: tuple[str, ...]) -> Setup:
    """The setup of a case: a wrapper and its features."""
    wrapper, *names = case
    setup = Setup(wrapper)
    for name in names:
        FEATURES[name].change(setup)
    return setup


# Other numbers of ranks come first: a test runs a feature with all later ones.


@feature("ranks", "one rank")
def one_rank(setup: Setup) -> None:
    setup.ranks = 1


@feature("ranks", "three ranks")
def three_ranks(setup: Setup) -> None:
    setup.ranks = 3


@feature("ranks", "two groups, side by side")
def sub_groups(setup: Setup) -> None:
    setup.ranks, setup.subgroups = 4, 2


@feature("ranks", "two data ranks of two tensor ranks")
def tensor(setup: Setup) -> None:
    setup.ranks, setup.tensor = 4, 2
    setup.model["inner"] = 10


@feature("ranks", "two data ranks of two tensor ranks, sequence parallel")
def sequence_parallel(setup: Setup) -> None:
    tensor(setup)
    setup.sequence_parallel, setup.length = True, 6


@feature("ranks", "two pipelines of two stages, 1F1B")
def pipeline(setup: Setup) -> None:
    setup.ranks, setup.pipeline, setup.micro_batches = 4, 2, 4
    setup.schedule = "one_f_one_b"
    setup.options["gradient_reduction"] = "sum"


def in_stages(name: str, title: str) -> None:
    """A feature: another schedule of the pipeline."""

    def scheduled(setup: Setup) -> None:
        pipeline(setup)
        setup.schedule = name.removesuffix("_1f1b")

    FEATURES[name] = Feature(name, "ranks", f"two pipelines, {title}", scheduled)


SCHEDULED = {
    "gpipe": "GPipe",
    "interleaved_1f1b": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
    "dualpipe": "DualPipe",
    "dualpipe_v": "DualPipeV",
}
for schedule, title in SCHEDULED.items():
    in_stages(schedule, title)


@feature("precision", "fp32 weights")
def fp32(setup: Setup) -> None:
    setup.dtype, setup.tolerance = torch.float32, 1e-4


@feature("precision", "bf16 weights, fp32 masters")
def bf16(setup: Setup) -> None:
    fp32(setup)
    setup.low, setup.tolerance = torch.bfloat16, 0.25


@feature("precision", "fp16 weights, fp32 masters, `LossScaler`")
def loss_scaler(setup: Setup) -> None:
    fp32(setup)
    setup.low, setup.tolerance = torch.float16, 0.1
    setup.scaler = "LossScaler"


@feature("precision", "fp32 weights, `autocast` to bf16")
def autocast(setup: Setup) -> None:
    fp32(setup)
    setup.autocast, setup.tolerance = torch.bfloat16, 0.1


@feature("precision", "fp32 weights, `autocast` to fp16, `GradScaler`")
def grad_scaler(setup: Setup) -> None:
    fp32(setup)
    setup.autocast, setup.tolerance = torch.float16, 0.1
    setup.scaler = "GradScaler"


@feature("accumulation", "two micro-batches")
def accumulate(setup: Setup) -> None:
    setup.micro_batches = 2


@feature("accumulation", "two micro-batches, the first in `no_sync()`")
def no_sync(setup: Setup) -> None:
    setup.micro_batches, setup.quiet = 2, True


@feature("accumulation", "all in `no_sync()`, then `reduce_gradients()`")
def reduce_gradients(setup: Setup) -> None:
    setup.micro_batches, setup.by_hand = 2, True


@feature("order", "forwards ahead of backwards, `F0 F1 B0 F2 B1 B2`")
def interleaved(setup: Setup) -> None:
    setup.micro_batches, setup.interleaved = 3, True


@feature("recompute", "torch's `checkpoint(use_reentrant=False)`")
def recompute(setup: Setup) -> None:
    setup.model["recompute"] = partial(torch_checkpoint, use_reentrant=False)


@feature("recompute", "torch's `checkpoint(use_reentrant=True)`")
def reentrant(setup: Setup) -> None:
    setup.model["recompute"] = partial(torch_checkpoint, use_reentrant=True)


@feature("recompute", "`checkpoint` of `xtrain.pipeline_parallel`")
def own_recompute(setup: Setup) -> None:
    setup.model["recompute"] = checkpoint


@feature("clipping", "clip the gradients' norm")
def clip(setup: Setup) -> None:
    setup.max_norm = 0.3


@feature("reduction", '`gradient_reduction="sum"`')
def sum_gradients(setup: Setup) -> None:
    setup.options["gradient_reduction"] = "sum"


@feature("collectives", "`collectives=RING`")
def ring(setup: Setup) -> None:
    setup.options["collectives"] = RING


@feature("optimizer", "`AdamW`")
def adamw(setup: Setup) -> None:
    setup.optimizer_class = torch.optim.AdamW
    setup.defaults = {"lr": 0.05, "eps": 0.01, "weight_decay": 0.1}


@feature("offload", "`offload=True`")
def offload(setup: Setup) -> None:
    setup.options["offload"] = True


@feature("tied", "tied weights")
def tied(setup: Setup) -> None:
    setup.model["tied"] = True


@feature("frozen", "frozen parameters")
def frozen(setup: Setup) -> None:
    setup.model["frozen"] = True


@feature("unused", "parameters unused on some ranks")
def unused(setup: Setup) -> None:
    setup.model["gated"] = setup.leave_out = True
    if setup.wrapper == "ddp":
        setup.options["find_unused_parameters"] = True


@feature("meta", "built on the meta device")
def meta(setup: Setup) -> None:
    setup.meta = True


@feature("inputs", "uneven inputs, `join()`")
def join(setup: Setup) -> None:
    setup.uneven = True


def around(inner: str, title: str) -> None:
    """A feature: the module has a wrapper already."""

    def wrapped(setup: Setup) -> None:
        setup.inner = inner

    name = f"around_{inner}"
    FEATURES[name] = Feature(name, INNER, f"around {title}", wrapped)


for inner in ("naive", "ddp", "zero1", "fsdp"):
    around(inner, WRAPPERS[inner].removesuffix(", stage 1"))
around("torch", "torch's `DistributedDataParallel`")
