"""Pipeline with data parallelism: when stages reduce, and what wrappers send."""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import SCHEDULES, render_svg, simulate, with_reductions
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

from ... import runs
from ...figures import REGISTRY
from ...values import value

REDUCTION = 2.0
"""How long it is drawn; F, B and W are 1."""
ROWS, SEQUENCE, RANKS, DATA = 2, 8, 4, 2  # rows of a micro-batch


@REGISTRY
def when_stages_reduce(name: str, ranks: int = 4, micro_batches: int = 6) -> str:
    """The timeline with each stage's reduction, which is the last that a rank does."""
    schedule = SCHEDULES[name](ranks, micro_batches)
    timeline = simulate(schedule)
    rows = list(zip(timeline.starts, timeline.ends, strict=True))
    reduced = replace(
        timeline,
        schedule=with_reductions(schedule),
        starts=tuple((*s, e[-1]) for s, e in rows),
        ends=tuple((*e, e[-1] + REDUCTION) for _, e in rows),
    )
    svg = render_svg(reduced, f"{name}, with the reductions of gradients", 27.0)
    svg = svg.replace('class="xs"', 'class="xs" style="--reduce:#6b4fa0"', 1)
    return re.sub(r"(REDUCE</title></rect><text[^>]*>)0<", r"\1sum<", svg)


def sent(wrapper: str, micro_batches: int) -> dict[str, int]:
    """Bytes that this rank sends over its data ranks in a second step of 1F1B.

    In `runner.step` and in `optimizer.step`, beside those of its stage's weights and of
    what is in no decoder layer.
    """
    mesh = init_mesh((RANKS // DATA, DATA), ("pipeline", "data"))
    pipeline, data = (mesh[axis].get_group() for axis in ("pipeline", "data"))
    schedule = SCHEDULES["one_f_one_b"](pipeline.size(), micro_batches)
    config = XtrainConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=4,
    )  # fmt: skip
    (stage,) = XtrainModel.stages(config, mesh, schedule)
    loss_fn = stage.module.loss_fn
    sizes = {name: p.nbytes for name, p in stage.module.named_parameters()}
    optimizer = wrapped(stage, wrapper, data)
    runner = PipelineRunner(stage, schedule, loss_fn, pipeline, data_group=data)
    rows = torch.ones(ROWS * micro_batches, SEQUENCE, dtype=torch.long)
    runner.step(rows, rows)  # shapes are agreed on here
    optimizer.step()
    optimizer.zero_grad()
    with CommLedger() as in_step:
        runner.step(rows, rows)
    with CommLedger() as in_update:
        optimizer.step()
    peers = set(dist.get_process_group_ranks(data))
    over_data = [
        sum(
            e.nbytes or 0 for e in ledger.events if e.kind == "send" and e.peer in peers
        )
        for ledger in (in_step, in_update)
    ]
    root = sum(n for name, n in sizes.items() if not name.startswith("layers."))
    found = (sum(sizes.values()), root, *over_data)
    return dict(zip(("weights", "root", "step", "update"), found, strict=True))


def wrapped(
    stage: PipelineStage, wrapper: str, data: dist.ProcessGroup
) -> torch.optim.Optimizer:
    """Put a wrapper around a stage; the optimizer that steps it."""
    options: dict[str, Any] = {
        "process_group": data,
        "gradient_reduction": "sum",
        "collectives": RING,  # whose messages a ledger sees
    }
    if wrapper.startswith("zero"):
        optimizer = ZeroOptimizer(
            list(stage.parameters()), torch.optim.AdamW, int(wrapper[-1]), **options
        )
        stage.reduction = optimizer
        return optimizer
    if wrapper == "ddp":
        stage.module = DistributedDataParallel(stage.module, **options)
    else:
        stage.module = FullyShardedDataParallel(
            stage.module,
            blocks=[DecoderLayer],
            reshard_after_forward=wrapper == "fsdp",
            **options,
        )
    return torch.optim.AdamW(list(stage.parameters()))


def of_first_stage(wrapper: str, micro_batches: int) -> dict[str, float]:
    """What its ranks send, their mean."""
    found = runs.remembered(sent, RANKS, wrapper, micro_batches)[:DATA]
    return {key: sum(f[key] for f in found) / DATA for key in found[0]}


@value
def sent_over_data(wrapper: str, micro_batches: int, during: str = "step") -> float:
    """As a multiple of the stage's weights."""
    found = of_first_stage(wrapper, micro_batches)
    return found[during] / found["weights"]
