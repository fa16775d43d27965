"""The statements of the original notes on pipelines, run, beside the right ones.

Each test is the proof of one entry of the errata page; more proofs of that page are in
tests/schedules/test_closed_forms.py.
"""

from itertools import permutations

import pytest
import torch
from torch import nn

from tests.pipeline_parallel import small_runs
from tests.pipeline_parallel.small_runs import (
    WIDTH,
    batch,
    close,
    drawn,
    exposed,
    layer,
    loss_sum,
    too_early,
)
from tests.pipeline_parallel.waiting_sends import waits_forever
from xtrain.plan import pipeline_idle
from xtrain.schedules import (
    SCHEDULES,
    dualpipe,
    dualpipe_v,
    gpipe,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_h2,
)
from xtrain_docs.lectures.lc5.errata import ORDERS, slots, waited

pytestmark = pytest.mark.usefixtures("on_gloo")
MESSAGES = "xtrain.schedules.passes:with_messages"
DUALPIPE = "xtrain.schedules.dualpipe:dualpipe"


NOTES = {"F": (0, 1, 1, 2), "B": (3, 2, 2, 3)}
"""The slots in which the notes draw forward and backward of stages 0 to 3."""


def needs(kind: str, stage: int, stages: int) -> tuple[str, int] | None:
    """The forward or backward that has to be done first; one micro-batch."""
    if kind == "F":
        return ("F", stage - 1) if stage else None
    return ("B", stage + 1) if stage < stages - 1 else ("F", stage)


def violations(slots: dict[str, tuple[int, ...]]) -> list[str]:
    """Actions that are not in a later slot than what they need."""
    problems = []
    for kind, row in slots.items():
        for stage, slot in enumerate(row):
            first = needs(kind, stage, len(row))
            if first is not None and slots[first[0]][first[1]] >= slot:
                problems.append(f"{stage}{kind}0 needs {first[1]}{first[0]}0")
    return problems


def staircase(ranks: int) -> dict[str, tuple[int, ...]]:
    """The slots of one micro-batch as it is played, a backward as long as a forward."""
    timeline = simulate(gpipe(ranks, 1), 1.0, 0.5, 0.5)
    slots = zip(*([int(s) for s in row] for row in timeline.starts), strict=True)
    return dict(zip("FB", slots, strict=True))


# ------------------------------------------------- E67: a picture of one micro-batch


@pytest.mark.verifies("xtrain.schedules.simulate:simulate")
def test_the_notes_draw_actions_before_what_they_need():
    assert violations(NOTES) == [
        "2F0 needs 1F0",
        "1B0 needs 2B0",
        "2B0 needs 3B0",
    ]
    for p in (2, 3, 4, 8):
        played = staircase(p)
        assert violations(played) == []
        assert played["F"] == tuple(range(p))
        assert played["B"] == tuple(2 * p - 1 - s for s in range(p))
    timeline = simulate(gpipe(4, 1), 1.0, 0.5, 0.5)
    assert timeline.makespan == 8
    assert timeline.idle_fraction == 6 / 8


# --------------------------------------------- E72: what splitting backward is good for


@pytest.mark.verifies("xtrain.schedules.zero_bubble:zb_h1")
@pytest.mark.parametrize(("p", "before", "after"), [(4, 9, 3), (8, 21, 7)])
def test_zero_bubble_gains_where_messages_take_no_time(p, before, after):
    m = 3 * p
    assert max(simulate(one_f_one_b(p, m)).idle) == before
    first, second = simulate(zb_h1(p, m)), simulate(zb_h2(p, m))
    assert (max(first.idle), max(second.idle)) == (after, 0)
    assert max(first.peak_activations) == p
    assert max(second.peak_activations) == 2 * p - 1
    assert second.starts[-1][0] == p - 1  # the last rank begins late all the same


# --------------------------------------------------- E73, E75: the order within a pair


AS_LISTED = slots("F MLP 1 | B attention 0 | F attention 1 | B MLP 0")
"""As the notes list the parts, one after the other; exchanges in between."""


def test_the_notes_order_of_a_pair_needs_what_is_not_done():
    assert too_early(AS_LISTED) == [
        "F(MLP) of 1 needs F(attention) of 1",
        "B(attention) of 0 needs B(MLP) of 0",
    ]
    orders = [tuple(order) for order in permutations(AS_LISTED)]
    possible = [order for order in orders if not too_early(order)]
    assert len(possible) == 6
    assert AS_LISTED not in possible
    assert too_early(ORDERS["pair"]) == []


def test_the_exchange_of_one_lies_under_any_computation_of_the_other():
    under = {}
    for computed, exchanged in ORDERS["pair"]:
        assert computed.micro_batch != exchanged.micro_batch
        under[str(exchanged)] = computed.part
    assert sorted(under.values()) == ["MLP", "MLP", "attention", "attention"]
    assert exposed(ORDERS["pair"], computation=1, exchange=1) == 0
    assert exposed(ORDERS["pair"], computation=1, exchange=1.5) == 2


def block_alone(ranks: int) -> list[dict]:
    """Outputs and gradients of each rank's, by one process that has all experts.

    An expert gets the same rows of every rank's micro-batch.
    """
    attentions = [layer(20) for _ in range(ranks)]
    experts = [layer(21 + rank) for rank in range(ranks)]
    found = [{} for _ in range(ranks)]
    for i in (0, 1):
        inputs = [
            drawn(40 + 10 * i + r, 2 * ranks, WIDTH).requires_grad_()
            for r in range(ranks)
        ]
        for rank, x in enumerate(inputs):
            y = attentions[rank](x)
            parts = y.split(2)
            output = torch.cat([experts[e](part) for e, part in enumerate(parts)])
            output.backward(drawn(45 + 10 * i + rank, 2 * ranks, WIDTH))
            found[rank] |= {f"output {i}": output.detach(), f"input {i}": x.grad}
    for rank in range(ranks):
        for name, module in (("attention", attentions[rank]), ("MLP", experts[rank])):
            found[rank][name] = next(module.parameters()).grad
    return found


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_overlapped_parts_give_what_one_process_gives(world, order):
    """Real exchanges, issued before a computation and waited for after it."""
    for size in (2, 3):
        right = block_alone(size)
        for rank, (_, found) in enumerate(world(size).run(small_runs.ran, order)):
            for name, tensor in right[rank].items():
                close(found[name], tensor)
            assert set(found) == set(right[rank])


# ------------------------------------------------------- E74: what DualPipe leaves open


@pytest.mark.verifies("xtrain.schedules.simulate:simulate", DUALPIPE)
@pytest.mark.parametrize("exchange", [0.5, 1.5, 2.0, 3.0])
def test_what_is_longer_than_a_pair_and_what_has_no_partner_is_exposed(exchange):
    for m in (20, 80):
        pairs = {20: 9, 80: 69}[m]
        open_ = pairs * max(0.0, 2 * exchange - 3) + (m - pairs) * 2 * exchange
        assert waited("dualpipe", 8, m, exchange) == pytest.approx(open_)
        everything = waited("one_f_one_b", 8, m, exchange)
        assert everything == pytest.approx(2 * exchange * m)
        assert 0 < open_ < everything


@pytest.mark.verifies(
    MESSAGES,
    "xtrain.schedules.chimera:chimera",
    "xtrain.schedules.dualpipe:dualpipe_simple",
    "xtrain.schedules.action:Schedule",
)
@pytest.mark.parametrize("name", ["chimera", "dualpipe_simple"])
def test_mirrored_stages_have_parts_of_the_gradient_and_their_sum_is_right(world, name):
    size, m = 4, 8
    model = nn.Sequential(*map(layer, range(size)))
    inputs, targets = map(torch.cat, batch(0, m))
    (loss_sum(model(inputs), targets) / len(inputs)).backward()
    found = world(size).run(small_runs.parts_of_gradients, name, m)
    for stage in range(size):
        right = next(model[stage].parameters()).grad
        parts = [gradients[stage] for gradients in found if stage in gradients]
        assert len(parts) == 2
        close(parts[0] + parts[1], right)
        assert all((part - right).norm() > 0.1 * right.norm() for part in parts)


# ---------------------------------------------- E76: one formula, two ways to write B


def as_reported(name: str, ranks: int, f: float, b: float, w: float) -> float:
    """The idle time by the DualPipe report's table; `b` is the full backward."""
    if name == "dualpipe":
        return (ranks / 2 - 1) * ((f + b) + b - 3 * w)
    return (ranks - 1) * (f + b - (2 * w if name == "zb_h1" else 0))


@pytest.mark.verifies("xtrain.plan.bubble:pipeline_idle", DUALPIPE)
@pytest.mark.parametrize("p", [4, 8, 16])
def test_both_tables_say_the_same_and_it_is_what_is_played(p):
    times = (1, 1, 1)
    for name in ("one_f_one_b", "zb_h1", "dualpipe"):
        idle = pipeline_idle(name, p, *times)
        assert idle == as_reported(name, p, 1, 2, 1)
        assert max(simulate(SCHEDULES[name](p, 3 * p)).idle) == idle
    for f, b, w in ((1, 1.5, 0.5), (2, 3, 1)):  # other times: both tables still agree
        for name in ("one_f_one_b", "zb_h1", "dualpipe"):
            ours = pipeline_idle(name, p, f, b, w)
            assert ours == as_reported(name, p, f, b + w, w)
    both, half = simulate(dualpipe(p, 4 * p)), simulate(dualpipe_v(p // 2, 2 * p))
    assert max(half.idle) == max(both.idle)
    assert (both.parameter_copies, half.parameter_copies) == (2, 1)
    assert max(both.peak_activations) == p + 1


# ------------------------------------------------------- E77: how many micro-batches


def test_with_a_fixed_batch_more_pipelines_have_fewer_micro_batches_and_idle_more():
    shares = []
    for data in (8, 32, 64, 128):
        m, left = divmod(1024, data)
        assert left == 0
        shares.append(simulate(one_f_one_b(8, m)).idle_fraction)
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(7 / 135)
    assert shares[-1] == pytest.approx(7 / 15)


# --------------------------------------------------------- E78: sends that wait


@pytest.mark.verifies(MESSAGES, "xtrain.schedules.one_f_one_b:one_f_one_b")
def test_1f1b_stands_still_if_its_sends_wait_for_their_receive(world):
    """On gloo, whose send waits. GPipe gets through, and so do fused messages."""
    ranks = world(4)
    found = ranks.run(small_runs.messages_only, "one_f_one_b", 8, False, 2.0)
    assert found == ["0SEND_F3", "1SEND_F2", "2SEND_F1", "3SEND_B0"]
    assert dict(enumerate(found)) == waits_forever(one_f_one_b(4, 8))
    for name, fused in (("gpipe", False), ("one_f_one_b", True), ("chimera", True)):
        assert not waits_forever(SCHEDULES[name](4, 8), fused)
        through = ranks.run(small_runs.messages_only, name, 8, fused, 60.0)
        assert through == [""] * 4, name


@pytest.mark.verifies(MESSAGES, "xtrain.schedules.one_f_one_b:one_f_one_b")
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_1f1b_runs_with_waiting_sends_if_even_and_odd_ranks_order_them_differently(
    world, p
):
    schedule = one_f_one_b(p, 4 * p)
    assert waits_forever(schedule)
    assert not waits_forever(schedule, by_parity=True)
    if p <= 4:  # with real messages on gloo, too
        arguments = ("one_f_one_b", 8, False, 60.0, True)
        found = world(p).run(small_runs.messages_only, *arguments)
        assert found == [""] * p


@pytest.mark.verifies(MESSAGES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_in_plain_order_only_gpipe_allows_sends_that_wait(p):
    made = [SCHEDULES[name](p, 4 * p) for name in SCHEDULES]
    for schedule in made:
        validate(schedule)  # all of them run with sends that return at once
    through = {s.name for s in made if not waits_forever(s)}
    fused = {s.name for s in made if not waits_forever(s, fused=True)}
    assert through == {"gpipe"}
    assert fused == {"gpipe", "one_f_one_b", "zb_h1", "chimera"}
