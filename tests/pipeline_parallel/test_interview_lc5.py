"""Claims of the interview page of lc5, each run with and without its cause."""

import pytest
import torch
from torch import nn

from tests.pipeline_parallel import small_runs
from tests.pipeline_parallel.small_runs import (
    WIDTH,
    close,
    drawn,
    layer,
    loss_sum,
)
from xtrain.schedules import one_f_one_b, simulate
from xtrain_docs.lectures.lc5.errata import ORDERS

pytestmark = pytest.mark.usefixtures("on_gloo")
MESSAGES = "xtrain.schedules.passes:with_messages"
ONE_F_ONE_B = "xtrain.schedules.one_f_one_b:one_f_one_b"


# ------------------------------------------- q68, q69: two forwards, and how to overlap


def test_two_forwards_overlap_too_but_leave_an_exchange_at_the_end_open():
    exposed = {
        name: small_runs.exposed(slots, computation=1, exchange=1)
        for name, slots in ORDERS.items()
    }
    assert exposed == {"pair": 0, "two_forwards": 1, "two_backwards": 1}
    for slots in ORDERS.values():
        assert small_runs.too_early(slots) == []


def test_an_exchange_is_issued_before_a_computation_and_waited_for_after_it(world):
    for log, _ in world(2).run(small_runs.ran, "pair"):
        verbs = [words.split(" ")[0] for words in log]
        assert verbs == ["issue", "compute", "wait"] * 4
        for issued, computed in zip(log[::3], log[1::3], strict=True):
            assert issued[-1] != computed[-1], "of the other micro-batch"


# ------------------------------------------------------ q70: what micro-batches change


def right_gradients(rows: int, ranks: int) -> list[torch.Tensor]:
    """Of each stage, in one process with the whole batch."""
    model = nn.Sequential(*map(layer, range(ranks)))
    (loss_sum(model(drawn(1, rows, WIDTH)), drawn(2, rows, WIDTH)) / rows).backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.verifies(MESSAGES, ONE_F_ONE_B)
def test_the_number_of_micro_batches_does_not_change_the_gradients(world):
    right = right_gradients(12, 3)
    for rows in ([12], [6, 6], [2] * 6, [1, 2, 5, 4]):
        divisors = [12.0] * len(rows)
        found = world(3).run(small_runs.gradient_of, rows, divisors)
        for gradient, expected in zip(found, right, strict=True):
            close(gradient, expected)


# --------------------------------------------------- q71: backward from the middle


def test_a_received_gradient_takes_the_place_of_the_loss():
    """All that a stage needs of those behind it, and what is often written instead."""
    first, second = layer(0), layer(1)
    x, target = drawn(1, 3, WIDTH), drawn(2, 3, WIDTH)
    y = first(x)
    loss_sum(second(y), target).backward()
    right = first[0].weight.grad.clone()

    handed_on = y.detach().requires_grad_()
    loss_sum(second(handed_on), target).backward()
    for backward in (
        lambda y: torch.autograd.backward(y, handed_on.grad),
        lambda y: (y * handed_on.grad).sum().backward(),
    ):
        first[0].weight.grad = None
        backward(first(x))
        close(first[0].weight.grad, right)
    first[0].weight.grad = None
    first(x).sum().backward()  # a gradient of ones: not what came back
    assert not torch.allclose(first[0].weight.grad, right)
    with pytest.raises(RuntimeError, match="scalar"):
        first(x).backward()


# ------------------------------------------------------------- q75: tied embeddings


@pytest.mark.verifies(MESSAGES, ONE_F_ONE_B)
def test_tied_copies_stay_equal_only_if_their_gradients_are_summed(world):
    first, _, last = world(3).run(small_runs.tied_weight, True)
    assert torch.equal(first, last)
    first, _, last = world(3).run(small_runs.tied_weight, False)
    assert (first - last).norm() > 0.1 * first.norm()


# ---------------------------------------------- q76: what the loss is divided by


@pytest.mark.verifies(MESSAGES, ONE_F_ONE_B)
def test_a_mean_of_means_is_wrong_where_micro_batches_differ(world):
    rows, p = [1, 2, 5, 3], 2
    m, right = len(rows), right_gradients(sum(rows), p)

    def error(divisors):
        found = world(p).run(small_runs.gradient_of, rows, divisors)
        pairs = zip(found, right, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    assert error([float(sum(rows))] * m) < 1e-12
    assert error([float(m * n) for n in rows]) > 0.1
    assert error([float(p * n) for n in rows]) > 1


# ---------------------------------------------------- q77: versions of the weights


def steps_between(ranks: int, micro_batches: int) -> list[int]:
    """Per rank of 1F1B: most backwards between a forward and its own backward."""
    most = []
    for actions in one_f_one_b(ranks, micro_batches).actions:
        at = {(a.kind, a.micro_batch): i for i, a in enumerate(actions)}
        kinds = [a.kind for a in actions]
        most.append(max(
            kinds[at["F", i] : at["BW", i]].count("BW") for i in range(micro_batches)
        ))  # fmt: skip
    return most


def test_a_step_after_each_backward_needs_p_minus_r_versions_on_rank_r():
    for p in (2, 4, 8):
        found = steps_between(p, 3 * p)
        assert found == [p - 1 - rank for rank in range(p)]
        peaks = simulate(one_f_one_b(p, 3 * p)).peak_activations
        assert [n + 1 for n in found] == list(peaks)


def test_a_backward_through_stepped_weights_is_refused_or_wrong():
    """Torch notices; by hand it is the gradient of no function."""
    module, x = layer(0), drawn(1, 3, WIDTH).requires_grad_()
    weight = next(module.parameters())
    stashed, sent = weight.detach().clone(), drawn(2, 3, WIDTH)
    y = module(x)
    (right,) = torch.autograd.grad(y, x, sent, retain_graph=True)
    with torch.no_grad():
        weight -= 0.1 * drawn(3, WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y, sent)
    before_tanh = sent * (1 - y.detach() ** 2)
    close(before_tanh @ stashed, right)
    wrong = before_tanh @ weight.detach()
    assert (wrong - right).norm() > 0.01 * right.norm()
