"""Pipeline with data parallelism: when stages reduce, and what wrappers send."""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.schedules import SCHEDULES, render_svg, simulate, with_reductions
from xtrain.train import accumulate, wrap

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

    In `accumulate` and in `optimizer.step`, beside those of its stage's weights and of
    what is in no decoder layer.
    """
    mesh = init_mesh((RANKS // DATA, DATA), ("pipeline", "data"))
    schedule = SCHEDULES["one_f_one_b"](RANKS // DATA, micro_batches)
    config = XtrainConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=4,
    )  # fmt: skip
    stages = XtrainModel.stages(config, mesh, schedule)
    sizes = {name: p.nbytes for name, p in stages[0].module.named_parameters()}
    kind, _, kept = wrapper.replace("zero ", "zero").partition(" ")
    options: dict[str, Any] = {"reshard_after_forward": False} if kept else {}
    options["collectives"] = RING  # whose messages a ledger sees
    model = wrap(stages, mesh, kind, schedule=schedule, **options)
    optimizer = model.optimizer(groups=[{"params": list(model.parameters())}])
    rows = torch.ones(ROWS * micro_batches, SEQUENCE, dtype=torch.long)
    accumulate(model, rows, rows)  # shapes are agreed on here
    optimizer.step()
    optimizer.zero_grad()
    with CommLedger() as in_step:
        accumulate(model, rows, rows)
    with CommLedger() as in_update:
        optimizer.step()
    peers = set(dist.get_process_group_ranks(mesh["data"].get_group()))
    over_data = [
        sum(
            e.nbytes or 0 for e in ledger.events if e.kind == "send" and e.peer in peers
        )
        for ledger in (in_step, in_update)
    ]
    root = sum(n for name, n in sizes.items() if not name.startswith("layers."))
    found = (sum(sizes.values()), root, *over_data)
    return dict(zip(("weights", "root", "step", "update"), found, strict=True))


def of_first_stage(wrapper: str, micro_batches: int) -> dict[str, float]:
    """What its ranks send, their mean."""
    found = runs.remembered(sent, RANKS, wrapper, micro_batches)[:DATA]
    return {key: sum(f[key] for f in found) / DATA for key in found[0]}


@value
def sent_over_data(wrapper: str, micro_batches: int, during: str = "step") -> float:
    """As a multiple of the stage's weights."""
    found = of_first_stage(wrapper, micro_batches)
    return found[during] / found["weights"]
