"""Every layout trains as one process does: losses, norms of gradients, weights.

All on the virtual cluster, twenty steps; those of up to eight ranks in real processes.
"""

from functools import cache

import pytest
import torch

from tests.model.stage_training import RATE, even_rows, train_whole
from tests.model.twins import DEEPSEEK, LIMIT, LOSSES, config_of
from tests.train.layouts import LAYOUTS, ROWS, name_of
from xtrain.cluster import VirtualCluster
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.train.layouts import make_mesh, wrapped_model
from xtrain.train.steps import accumulate, clip_grad_norm, update_balance_biases

DIGITS = 1e-9
STEPS, FEW = 20, 3
DENSE = {"num_hidden_layers": 4, "num_key_value_heads": 2}
EXPERTS = DENSE | {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8,
    "first_k_dense_replace": 1, "moe_intermediate_size": 4,
}  # fmt: skip
MODELS = {"dense": DENSE, "experts": EXPERTS, "deepseek": DENSE | DEEPSEEK | LOSSES}
SYMBOLS = (
    "xtrain.train.wrap:wrap",
    "xtrain.train.wrap:WrappedModel",
    "xtrain.train.steps:accumulate",
    "xtrain.train.steps:clip_grad_norm",
    "xtrain.train.layouts:make_mesh",
    "xtrain.train.layouts:wrapped_model",
    "xtrain.train.layouts:make_model",
)


def adamw(parameters):
    """A large eps: where a gradient is nearly zero, Adam would enlarge its rounding."""
    return {"params": parameters, "lr": 0.03, "weight_decay": 0.1, "eps": 1e-3}


def wrapped(config, layout):
    return wrapped_model(config, layout, make_mesh(layout), dtype=torch.float64)


def train(layout, config, expected, weights):
    """Steps of a layout, beside those of one process."""
    model = wrapped(config, layout)
    options = {k: v for k, v in adamw(None).items() if k != "params"}
    optimizer = model.optimizer(torch.optim.AdamW, **options)
    for step, right in enumerate(expected):
        batch = even_rows(step, model.data_group.rank(), layout.data)
        loss = accumulate(model, *batch, micro_batches=layout.micro_batches)
        norm = clip_grad_norm(model, LIMIT)
        mine = loss.item(), norm.item()
        assert mine == pytest.approx(right, rel=DIGITS, abs=0), step
        optimizer.step()
        optimizer.zero_grad()
        update_balance_biases(model, RATE)
    for stage, part in zip(model.stages, model.parts, strict=True):
        found = dict(part.named_parameters()) | dict(part.named_buffers())
        if model.kind in ("fsdp", "hsdp"):
            found = stage.module.full_state_dict()
        for name, weight in found.items():
            right = weights[name]
            if not name.endswith("balance_bias"):  # which all ranks have whole
                right = part.placement(name).of(right)
            torch.testing.assert_close(
                weight, right, rtol=DIGITS, atol=DIGITS, msg=name
            )


@cache
def one_process(kind: str, ranks: int, micro_batches: int):
    """Its losses and norms, and its weights after them."""
    model = XtrainModel(config_of(**MODELS[kind]), dtype=torch.float64)
    others = [p for p in model.parameters() if p.dim() <= 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [adamw(matrices), adamw(others) | {"weight_decay": 0.0}]
    more = LIMIT, even_rows, ranks, micro_batches
    optimizer, found, weights = torch.optim.AdamW(groups), [], {}
    for first, last in ((0, FEW), (FEW, STEPS)):
        found += train_whole(model, optimizer, first, last, *more)
        weights[last] = {n: t.clone() for n, t in model.state_dict().items()}
    assert min(norm for _, norm in found) > LIMIT
    return found, weights


def case(layout: Layout, steps: int, kind: str = ""):
    kind = kind or ("experts" if layout.expert > 1 else "dense")
    found, weights = one_process(kind, layout.data, layout.micro_batches)
    return layout, config_of(**MODELS[kind]), found[:steps], weights[steps]


def named(layouts):
    """Params of a test. Only where a schedule is made is it waited for as evidence."""
    made = [pytest.mark.verifies("xtrain.train.layouts:make_schedule")]
    return [
        pytest.param(x, id=name_of(x), marks=made if x.pipeline > 1 else [])
        for x in layouts
    ]


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", named(LAYOUTS))
def test_on_the_virtual_cluster_twenty_steps_equal_one_process(layout):
    VirtualCluster(layout.gpus).run(train, *case(layout, STEPS))


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", named(x for x in LAYOUTS if x.gpus <= ROWS))
def test_in_real_processes_three_steps_equal_one_process(world, layout):
    world(layout.gpus).run(train, *case(layout, FEW))


BALANCED = [
    Layout(data=2, zero=3, micro_batches=2),
    Layout(data=4, expert=2, zero=1, micro_batches=2),
    Layout(data=2, expert=2, tensor=2, micro_batches=2),
    Layout(pipeline=2, data=2, expert=2, zero=2, micro_batches=2),
    Layout(pipeline=2, context=2, data=2, micro_batches=2),
]


@pytest.mark.verifies(*SYMBOLS, "xtrain.train.steps:update_balance_biases")
@pytest.mark.parametrize("layout", named(BALANCED))
def test_auxiliary_losses_and_biases_are_those_of_one_process(layout):
    """Biases that moved otherwise would route otherwise, and soon change the loss."""
    VirtualCluster(layout.gpus).run(train, *case(layout, STEPS, "deepseek"))
