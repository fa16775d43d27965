"""Lecture 4: our tensor parallelism against torch's.

    torch   XtrainModel as on one device, cut by `parallelize_module` (DTensor)
    ours    XtrainModel on a mesh with a "tensor" axis

Both cut the same matrices along the same dims, and all ranks train on the same batch
with torch's fused AdamW; the losses must agree. torch's plan is that of its tutorial:
what several layers read becomes a DTensor once, so that their gradients are summed by
one all-reduce; attention and SwiGLU compute on local tensors; the vocabulary stays cut
through `loss_parallel`. In the rows with sequence parallelism the norms see a slice of
the sequence, on both sides.

`size` is that of all weights in bytes.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

from xtrain.bench.race import Case, Contestant, Goal, Race
from xtrain.bench.training_trials import (
    CHECKED,
    HEADS,
    OPTIONS,
    TOLERANCE,
    Shape,
    adamw,
    model_for,
    sum_of,
    training_trial,
)
from xtrain.model import XtrainModel
from xtrain.plan import Traffic
from xtrain.plan.tensor_parallel import partial_gradient_calls, tensor_parallel_calls

TITLE = "Lecture 4: our tensor parallelism against torch's DTensor"

MiB = 2**20
# As many key heads as query heads: torch has no replicas of heads for more ranks.
SHAPES = {
    "batch8": Shape(4, 8, 256, HEADS),
    "batch1": Shape(4, 1, 256, HEADS),
    "small": Shape(4, 1, 64, HEADS),
}
SIZES = {"batch8": 14 * MiB, "batch1": 14 * MiB, "small": 2 * MiB}

Wrapped = tuple[Callable[..., Tensor], Optimizer]


def torch_tp(
    model: XtrainModel, group: ProcessGroup, sequence_parallel: bool = False
) -> Wrapped:
    """torch's `parallelize_module` with the plan of its tutorial."""
    mesh = mesh_of(model, group, group.group_name)
    between = Shard(1) if sequence_parallel else Replicate()
    parallelize_module(model, mesh, torch_plan(len(model.layers), between))

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens).flatten(0, 1)
        mean = F.cross_entropy(logits, labels.flatten())
        return mean.to_local() if isinstance(mean, DTensor) else mean

    # Fused AdamW takes DTensors or plain tensors (the norms), not both in one group.
    parameters = list(model.parameters())
    cut = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [{"params": members} for members in (cut, whole) if members]
    return loss, AdamW(groups, **OPTIONS)


def torch_plan(layers: int, between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Styles by module; `between` is how activations lie between the matrices."""
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        ),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    norms = ["norm"]
    for layer in (f"layers.{index}" for index in range(layers)):
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for block, reads, sums in (
            ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
            ("mlp", ("gate_proj", "up_proj"), "down_proj"),
        ):
            others = (None,) if block == "self_attn" else ()  # the positions
            plan[f"{layer}.{block}"] = PrepareModuleInput(
                input_layouts=(between, *others),
                desired_input_layouts=(Replicate(), *others),
            )
            for name in reads:
                plan[f"{layer}.{block}.{name}"] = ColwiseParallel()
            plan[f"{layer}.{block}.{sums}"] = RowwiseParallel(output_layouts=between)
    if isinstance(between, Shard):
        plan |= {name: SequenceParallel() for name in norms}
    return plan


def our_tp(
    model: XtrainModel, group: ProcessGroup, sequence_parallel: bool = False
) -> Wrapped:
    """The same config on a mesh; it draws the same weights and keeps its slices."""
    mesh = mesh_of(model, group, "tensor")
    device = next(model.parameters()).device
    cut = XtrainModel(
        model.config, mesh, sequence_parallel=sequence_parallel, device=device
    )
    return cut, adamw(cut)


def mesh_of(model: XtrainModel, group: ProcessGroup, axis: str) -> DeviceMesh:
    """The group as the only axis of a mesh.

    To DTensor's caches meshes of the same ranks and names are one: on two backends
    they must be called differently, or both use the group of the first.
    """
    device = next(model.parameters()).device.type
    return DeviceMesh.from_group(group, device, mesh_dim_names=(axis,))


def first_batch() -> int:
    """All ranks hold parts of one model: they train on the same batch."""
    return 0


def traffic(shape: Shape, sequence_parallel: bool, case: Case) -> Traffic:
    """Every collective of a step, as `xtrain.plan` counts them."""
    config = model_for(case, shape).config
    calls = tensor_parallel_calls(
        config,
        shape.batch,
        shape.sequence,
        case.ranks,
        sequence_parallel=sequence_parallel,
        itemsize=4,
    )
    calls += partial_gradient_calls(
        config,
        config.num_hidden_layers,
        case.ranks,
        sequence_parallel=sequence_parallel,
    )
    return sum_of(call.traffic for call in calls)


def sides(shape: Shape, sequence_parallel: bool, update: bool) -> list[Contestant]:
    """torch's and ours, on gloo and on shared memory."""
    on = partial(partial, training_trial, shape, data_rank=first_batch, update=update)
    torchs = partial(torch_tp, sequence_parallel=sequence_parallel)
    ours = partial(our_tp, sequence_parallel=sequence_parallel)
    return [
        Contestant("torch TP", on(torchs, "gloo", around=loss_parallel)),
        Contestant(
            "ours", on(ours, "gloo"), partial(traffic, shape, sequence_parallel)
        ),
        Contestant(
            "torch TP on xtrain-shm", on(torchs, "xtrain-shm", around=loss_parallel)
        ),
        Contestant("ours on xtrain-shm", on(ours, "xtrain-shm")),
    ]


def race(
    kind: str,
    step: str,
    goals: Mapping[str, float] | None = None,
    sequence_parallel: bool = False,
    update: bool = True,
) -> Race:
    """One kind of race of one step; the least ratios asked at 2 ranks."""
    shape, size = SHAPES[step], SIZES[step]
    title = {"tp": "", "sp": ", sequence parallel", "gradients": ", no update"}[kind]
    return Race(
        f"{kind}_{step}",
        f"A step, {step}{title}",
        tuple(sides(shape, sequence_parallel, update)),
        sizes=(size,),
        tolerance=TOLERANCE,
        checked_calls=CHECKED,
        memory=update and step == "batch8",
        goals=tuple(Goal(who, least, size, 2) for who, least in (goals or {}).items()),
    )


GOALS = {
    "batch8": {"ours": 1.15},
    "batch1": {"ours": 1.4, "ours on xtrain-shm": 2.0},
    "small": {},
}
RACES = [
    *(race("tp", step, goals) for step, goals in GOALS.items()),
    *(race("sp", step, sequence_parallel=True) for step in ("batch8", "batch1")),
    race("gradients", "batch1", update=False),
]
