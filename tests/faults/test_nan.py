"""A tensor that is not finite: rank, phase, layer and tensor are named everywhere."""

import dataclasses
import math
import re

import pytest
import torch
import torch.distributed as dist

from tests.faults.cases import CASES, NAN
from tests.faults.trained import LAYOUTS, MODEL, ONE_OF_EACH, SEVERAL, recipe, select
from xtrain.cluster import VirtualCluster
from xtrain.plan import Layout
from xtrain.train.nonfinite_watch import not_finite, sent_and_received
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.run import TrainingRun

SYMBOLS = (
    "xtrain.train.nonfinite:NonFiniteGuard",
    "xtrain.train.nonfinite_watch:Watch",
    "xtrain.comm.call_observer:CallObserver",
    "xtrain.train.places:place_of",
)
ATTENTION = "layers.1.self_attn.o_proj"
MLP = "layers.1.mlp"
EMBEDDING = "embed_tokens"


def spoil(run, name, how, times=100):
    """From step 2 on, let a module of this rank compute NaN; whether it is here."""
    left = [times]

    def forward(module, inputs, output):
        if run.step < 1 or not left[0]:
            return None
        if how == "backward":
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * float("nan"))
            return None
        left[0] -= 1
        output = output.clone()
        output.detach()[..., 0] = float(how)
        return output

    def before(module, inputs):
        return (inputs[0] * float("nan"), *inputs[1:]) if run.step == 1 else None

    for part in run.model.parts:
        for found, module in part.named_modules():
            if found == name and how == "input":
                module.register_forward_pre_hook(before)
            elif found == name:
                module.register_forward_hook(forward)


def spoil_weight(run, name):
    """A NaN in the first weight of this rank whose name begins so."""
    found = [p for n, p in run.model.named_parameters() if n.startswith(name)]
    next(p for p in found if p.numel()).detach().view(-1)[-1] = float("nan")


def error_of(made, who, name, how, times=100):
    """What this rank raises in step 2, and whether its weights are as before."""
    run = TrainingRun(made, torch.device("cpu"))
    own = dist.get_rank() == who
    if own and how != "weight":
        spoil(run, name, how, times)
    try:
        for _ in range(2):
            if own and how == "weight" and run.step == 1:
                spoil_weight(run, name)
            before = [p.detach().clone() for p in run.model.parameters()]
            run.train_step(next(run.batches))
            run.step += 1
    except FloatingPointError as error:
        after = list(run.model.parameters())
        same = all(
            x.equal(y) or how == "weight" for x, y in zip(before, after, strict=True)
        )
        return str(error), same, run.step
    finally:
        run.close()
    return "no error", False, run.step


def check(results, *words):
    """All ranks raise one error in step 2; it has these words, in this order."""
    assert len(set(results)) == 1, results
    text, weights_stay, step = results[0]
    assert weights_stay and step == 1
    assert re.match(r"step 2: (loss|norm) is (nan|inf); ", text), text
    assert re.search(".*".join(words), text), text


FIRST, BEFORE = "first on", "weights were not finite before it:"
SPOILED = {
    "forward": [
        (ATTENTION, "nan", f"forward, (output of|in) {ATTENTION}"),
        (ATTENTION, "input", f"forward, (output of|in) {ATTENTION}, "),
        (MLP, "inf", f"forward, output of {MLP}, .* are inf"),
    ],
    "backward": [
        (ATTENTION, "backward", f"backward, gradient of the output of {ATTENTION}, "),
    ],
    "optimizer": [
        ("layers.1.", "weight", r"layers\.1\.\S+\.weight, 1 of [\d,]+ are nan"),
    ],
}
"""By phase: a module, how it is spoiled, and what is told. The optimizer leaves a
weight of the step before."""
IN_A_STEP = SPOILED["forward"] + SPOILED["backward"]


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("case", select(c for c in CASES if c.fault == NAN))
def test_the_first_tensor_is_named_on_every_rank(world, tmp_path, case):
    what = BEFORE if case.phase == "optimizer" else FIRST
    for layout in LAYOUTS[case.axis]:
        made, last = recipe(tmp_path, layout=layout), layout.gpus - 1
        place = rf"rank {last} \((\w+ 1(, )?)+\): "
        for name, how, words in SPOILED[case.phase]:
            results = world(layout.gpus).run(error_of, made, last, name, how)
            check(results, f"{what} {place}", words)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", ONE_OF_EACH, ids=str)
def test_the_embedding_of_the_data_is_named(world, tmp_path, layout):
    results = world(2).run(error_of, recipe(tmp_path, layout), 0, EMBEDDING, "nan")
    check(results, r"first on rank 0 \(\w+ 0\): forward, output of embed_tokens, ")


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", SEVERAL, ids=str)
def test_with_several_axes_the_place_on_each_is_named(tmp_path, layout):
    place = (
        r"rank 5 \((pipeline 1, data 0, tensor|expert_data 1, expert 0, context) 1\)"
    )
    for name, how, words in IN_A_STEP:
        results = VirtualCluster(8).run(
            error_of, recipe(tmp_path, layout), 5, name, how
        )
        check(results, f"first on {place}: ", words)


@pytest.mark.verifies(*SYMBOLS)
def test_the_last_layer_may_be_on_the_first_rank(tmp_path):
    """And what ranks agree on before a step, with infinity in it, is no part of it."""
    layout = Layout(
        pipeline=2, micro_batches=4, schedule="zb_v", chunks=2, zero=3, data=2
    )
    model = dataclasses.replace(MODEL, num_hidden_layers=4)
    made = recipe(tmp_path, layout, model=model)
    for name, how, words in IN_A_STEP:
        name, words = (text.replace("layers.1", "layers.3") for text in (name, words))
        results = VirtualCluster(4).run(error_of, made, 1, name, how)
        check(results, r"first on rank 1 \(pipeline 0, data 1\): ", words)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", [*ONE_OF_EACH, Layout()], ids=str)
def test_what_does_not_come_again_is_told_so(tmp_path, layout):
    """And a healthy step, with its padding and masks, has nothing to be named."""
    count = layout.micro_batches
    results = VirtualCluster(layout.gpus).run(
        error_of, recipe(tmp_path, layout), layout.gpus - 1, ATTENTION, "nan", count
    )
    check(results, "run again, every tensor of it is finite: suspect the hardware")


@pytest.mark.verifies(*SYMBOLS)
def test_one_process_names_it_too(tmp_path):
    for name, how, words in IN_A_STEP:
        made = recipe(tmp_path, Layout())
        check(VirtualCluster(1).run(error_of, made, 0, name, how), "rank 0: ", words)


def spoiled_run(made, times):
    """Losses and weights of four steps, from the second on so many are spoiled; or the
    error. With 0 the second one is never run."""
    run = TrainingRun(made, torch.device("cpu"))
    if dist.get_rank() == 1:
        spoil(run, ATTENTION, "nan", times)
    losses = []
    try:
        while run.step < 4:
            batch = next(run.batches)
            if times or run.step != 1:
                losses.append(run.train_step(batch)[0])
            run.step += 1
        return losses, [p.detach().clone() for p in run.model.parameters()]
    except FloatingPointError as error:
        return losses, str(error)
    finally:
        run.close()


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_step_is_left_out_as_if_it_had_not_been(world, tmp_path, zero):
    optimizer = OptimizerSpec(skip_nonfinite=1)
    made = recipe(tmp_path, Layout(data=2, zero=zero), optimizer=optimizer)
    runs, expected = (world(2).run(spoiled_run, made, times) for times in (1, 0))
    for (losses, weights), (others, right) in zip(runs, expected, strict=True):
        assert math.isnan(losses.pop(1)) and losses == others
        assert all(map(torch.equal, weights, right))
    for losses, text in world(2).run(spoiled_run, made, 9):
        assert len(losses) == 2 and text.startswith("step 3: loss is nan; first on")


def test_what_counts():
    assert not_finite(torch.tensor([1.0, float("-inf")])) == ""
    assert not_finite(torch.tensor([1, 2])) == ""
    wrong = torch.tensor([[1.0, float("nan")], [float("inf"), float("nan")]])
    assert not_finite(wrong) == "3 of 4 are nan or inf ([2, 2], float32)"


class Group:
    def rank(self):
        return 1


def test_what_a_call_sends_and_receives():
    x, y = torch.zeros(1), torch.ones(1)
    root = type("Options", (), {"rootRank": 1})()
    other = type("Options", (), {"rootRank": 0})()
    cases = [
        ("all_reduce", [[x], root], [x], [x]),
        ("all_gather", [[[x, x]], [y], root], [y], [x, x]),
        ("all_gather_single", [x, y, root], [y], [x]),
        ("scatter", [[x], [], other], [], [x]),
        ("broadcast", [[x], root], [x], []),
        ("broadcast", [[x], other], [], [x]),
        ("send", [[x], 0, 0], [x], []),
        ("recv", [[x], 0, 0], [], [x]),
        ("barrier", [root], [], []),
    ]
    for op, args, sent, received in cases:
        found = sent_and_received(op, Group(), args)
        assert [list(map(id, part)) for part in found] == [
            list(map(id, sent)),
            list(map(id, received)),
        ], op
