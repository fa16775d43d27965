"""Every schedule, at many sizes: whole, runnable, within its memory, or refused."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    parse_action,
    parse_actions,
    simulate,
    validate,
    with_messages,
    with_reductions,
    zb_h1,
)


@st.composite
def schedules(draw):
    """A legal schedule of any name and size."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 9))
    m = draw(st.integers(1, 24))
    if name == "interleaved":
        return interleaved(ranks, m, draw(st.integers(1, 4)))
    if name in ("chimera", "dualpipe", "dualpipe_simple"):
        ranks += ranks % 2
        return SCHEDULES[name](ranks, 2 * m if name == "chimera" else 2 * (ranks + m))
    return SCHEDULES[name](ranks, 2 * ranks + m if name == "dualpipe_v" else m)


@given(schedules())
@settings(max_examples=150, deadline=None)
@pytest.mark.verifies(
    "xtrain.schedules.validate:validate",
    "xtrain.schedules.dualpipe:_two_ways",
    "xtrain.schedules.passes:_with_messages",
)
def test_every_schedule_is_whole_and_can_be_run(schedule):
    validate(schedule)


@given(schedules(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=80, deadline=None)
@pytest.mark.verifies("xtrain.schedules.simulate:_Player")
def test_a_rank_does_one_thing_at_a_time_and_waits_for_what_it_needs(schedule, p2p):
    timeline = simulate(schedule, 1.0, 0.8, 0.7, p2p=p2p)
    done = {}
    for rank, actions in enumerate(schedule.actions):
        clock = 0.0
        for action, start, end in zip(
            actions, timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            assert start >= clock and end > start
            clock = end
            for kind, stage, i, _ in action.parts:
                for one in ("B", "W") if kind == "BW" else (kind,):
                    done[one, stage, i] = start, end, rank
    last = schedule.stages - 1
    for (kind, stage, i), (start, _, rank) in done.items():
        needs = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[kind]
        if kind == "B":
            assert start >= done["F", stage, i][1] or stage == last
        if 0 <= needs[1] <= last:
            _, ready, source = done[*needs, i]
            assert start >= ready + (p2p if source != rank else 0.0) - 1e-9 or (
                kind == "W" and start == done["B", stage, i][0]
            )


@given(schedules())
@settings(max_examples=60, deadline=None)
@pytest.mark.verifies("xtrain.schedules.action:parse_action")
def test_what_is_printed_is_read_again(schedule):
    for order in (schedule, with_reductions(with_messages(schedule))):
        for actions in order.actions:
            assert parse_actions(" ".join(map(str, actions))) == tuple(actions)


def test_the_printed_forms():
    pair = Action("F", 2, 4, Action("BW", 5, 1))
    assert str(pair) == "2F4&5B1"
    assert [str(part) for part in pair.parts] == ["2F4", "5BW1"]
    assert str(Action("REDUCE", 3)) == "3REDUCE"
    for text in ("2X3", "F0", "2F", "2F4&", "2F4&5F1", "2F4&5B1&1B1", ""):
        with pytest.raises(ValueError, match=r"is not an action|a forward & a"):
            parse_action(text)


@given(schedules())
@settings(max_examples=60, deadline=None)
@pytest.mark.verifies(
    "xtrain.schedules.passes:with_messages",
    "xtrain.schedules.passes:with_reductions",
    "xtrain.schedules.passes:message_of",
)
def test_passes_add_each_message_twice_and_each_reduction_once(schedule):
    order = with_reductions(with_messages(schedule))
    sent, received, reduced = [], [], []
    for rank, actions in enumerate(order.actions):
        left = dict.fromkeys(schedule.stages_of(rank), schedule.micro_batches)
        if schedule.placement == "mirror":
            left = dict.fromkeys(left, schedule.micro_batches // 2)
        for action in actions:
            if action.kind.startswith("SEND"):
                step = 1 if action.kind == "SEND_F" else -1
                sent.append((action.kind[-1], action.stage + step, action.micro_batch))
            elif action.kind.startswith("RECV"):
                received.append((action.kind[-1], action.stage, action.micro_batch))
            elif action.kind == "REDUCE":
                reduced.append((rank, action.stage))
                assert left[action.stage] == 0, "gradients are still to come"
            for part in action.parts:
                left[part.stage] -= part.kind in ("W", "BW")
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)
    held = [(r, s) for r in range(order.ranks) for s in order.stages_of(r)]
    assert sorted(reduced) == sorted(held)
    if schedule.placement == "loop" and schedule.ranks > 1:
        crossings = schedule.stages - 1
        assert len(sent) == 2 * crossings * schedule.micro_batches


def changed(schedule, rank, edit):
    """The schedule with one rank's actions edited in place."""
    orders = [list(actions) for actions in schedule.actions]
    edit(orders[rank])
    return replace(schedule, actions=tuple(orders))


BROKEN = {
    "a missing action": (1, lambda a: a.pop(), r"1B3 is done 0 times; 1W3 is done 0"),
    "one done twice": (0, lambda a: a.append(a[0]), r"0F0 is done 2 times"),
    "another's stage": (
        0, lambda a: a.append(Action("F", 1, 0)), r"rank 0 does 1F0, .* is on rank 1"
    ),
    "no such micro-batch": (0, lambda a: a.append(Action("F", 0, 9)), r"0F9 is out"),
    "backward before forward": (1, lambda a: a.reverse(), r"deadlocks: rank 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.verifies("xtrain.schedules.validate:_incomplete")
def test_a_broken_schedule_is_refused_with_what_is_wrong(what):
    rank, edit, words = BROKEN[what]
    with pytest.raises(ValueError, match=words):
        validate(changed(one_f_one_b(3, 4), rank, edit))


def test_a_cycle_of_two_ranks_is_found():
    def late(actions):
        actions.append(actions.pop(1))  # F1 after everything: rank 0 needs B0 first

    schedule = one_f_one_b(2, 2)
    with pytest.raises(ValueError, match="deadlocks: rank 0 at 0BW1"):
        validate(changed(schedule, 0, late))


def test_messages_are_received_in_the_order_in_which_they_were_sent():
    """Two stages of rank 1 need messages of rank 0, the later one first."""
    order = parse_actions("0F0 2F0 2F1 0F1 2B0 0B0 2B1 0B1 0W0 0W1 2W0 2W1")
    other = parse_actions("1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1 1W0 1W1 3W0 3W1")
    schedule = Schedule("made up", 2, 2, 2, "loop", (order, other))
    with pytest.raises(ValueError, match="deadlocks"):
        validate(schedule)
    good = interleaved(2, 4)
    validate(good)
    text = str(with_messages(good))
    assert "1RECV_F0" in text and "3RECV_F0" in text


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
@pytest.mark.verifies("xtrain.schedules.validate:_stuck_messages")
def test_receives_in_another_order_than_the_sends_are_found(name, monkeypatch):
    """Receives that stand where they are needed, whatever was sent before."""

    def where_needed(schedule):
        orders = []
        for actions in with_messages(schedule).actions:
            receives = {
                (a.kind[-1], a.stage, a.micro_batch): a
                for a in actions
                if a.kind.startswith("RECV")
            }
            orders.append(order := [])
            for action in actions:
                for kind, stage, i, _ in action.parts:
                    needed = receives.get((kind[0], stage, i))
                    if needed and kind in ("F", "B", "BW"):
                        order.append(needed)
                if not action.kind.startswith("RECV"):
                    order.append(action)
        return replace(schedule, actions=tuple(orders))

    schedule = SCHEDULES[name](4, 8)
    validate(schedule)
    checks = sys.modules["xtrain.schedules.validate"]
    monkeypatch.setattr(checks, "with_messages", where_needed)
    with pytest.raises(ValueError, match=r"rank \d at \dRECV_B0 gets .* instead"):
        validate(schedule)


def test_the_memory_allowed_is_a_limit():
    validate(one_f_one_b(4, 8), activations=4)
    with pytest.raises(
        ValueError, match=r"rank 0 holds 8 .* but 4 are allowed; rank 1"
    ):
        validate(gpipe(4, 8), activations=4)


ILLEGAL = [
    ("gpipe", (0, 4), r"ranks=0, but it is a whole number of at least 1"),
    ("one_f_one_b", (2, 1.5), r"micro_batches=1.5"),
    ("interleaved", (4, 0), r"micro_batches=0, but it is a whole number of at least 1"),
    ("chimera", (4, 1), r"multiple of 2; take 2$"),
    ("dualpipe", (3, 8), r"ranks=3, but .* even number of ranks; take 2 or 4"),
    ("dualpipe", (4, 9), r"micro_batches=9, but half .* take 8 or 10"),
    ("dualpipe", (4, 6), r"micro_batches=6, but .* take 8 or more"),
    ("dualpipe_v", (4, 7), r"micro_batches=7, but .* take 8 or more"),
    ("chimera", (5, 4), r"ranks=5"),
    ("chimera", (4, 3), r"micro_batches=3"),
]


@pytest.mark.parametrize(("name", "sizes", "words"), ILLEGAL)
def test_illegal_sizes_name_the_rule_and_the_nearest_legal_ones(name, sizes, words):
    with pytest.raises(ValueError, match=f"^{name}: .*{words}"):
        SCHEDULES[name](*sizes)


@given(schedules(), st.data(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=80, deadline=None)
@pytest.mark.verifies(
    "xtrain.schedules.simulate:simulate", "xtrain.schedules.simulate:_Player",
    "xtrain.schedules.simulate:Timeline",
)  # fmt: skip
def test_stages_of_unequal_cost_take_their_own_times(schedule, data, p2p):
    """A list of equal times is that number; else every action lasts as its stage."""
    cost = st.floats(0.25, 4)
    of_stage = st.lists(cost, min_size=schedule.stages, max_size=schedule.stages)
    times = {"F": data.draw(of_stage), "B": data.draw(of_stage), "W": data.draw(cost)}
    timeline = simulate(schedule, *times.values(), p2p=p2p)
    times["W"] = [times["W"]] * schedule.stages

    def lasts(action):
        kinds = {"BW": ("B", "W")}
        return sum(
            times[kind][part.stage]
            for part in action.parts
            for kind in kinds.get(part.kind, (part.kind,))
        )

    for rank, actions in enumerate(schedule.actions):
        rows = zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, start, end in rows:
            assert end - start == pytest.approx(lasts(action))
        assert timeline.works[rank] == pytest.approx(sum(map(lasts, actions)))
        spent = timeline.ends[rank][-1] - timeline.starts[rank][0]
        assert timeline.idle[rank] + timeline.works[rank] == pytest.approx(spent)
    assert timeline.work == max(timeline.works)
    fractions = [
        i / (i + w) for i, w in zip(timeline.idle, timeline.works, strict=True)
    ]
    assert timeline.idle_fraction == pytest.approx(max(fractions), abs=1e-12)
    one = simulate(schedule, 1.0, 0.8, 0.7, p2p=p2p)
    listed = [[time] * schedule.stages for time in (1.0, 0.8, 0.7)]
    assert simulate(schedule, *listed, p2p=p2p) == one


def test_unequal_stages_of_1f1b_by_hand():
    """The slowest stage has two gaps of 1, at its first B and its last one."""
    timeline = simulate(one_f_one_b(3, 4), [1, 3, 2], [1, 3, 2], 0)
    assert timeline.works == (8, 24, 16) and timeline.work == 24
    assert timeline.makespan == 1 + (24 + 2) + 1
    assert timeline.idle == (28 - 8, 2, 20 - 16)
    assert timeline.bubble_over_ideal == 20 / 24
    assert timeline.idle_fraction == 20 / 28


def test_times_are_not_negative():
    with pytest.raises(ValueError, match="time of B is -1"):
        simulate(gpipe(2, 2), backward_input=-1)
    with pytest.raises(ValueError, match="time of F of stage 1 is -2, but"):
        simulate(gpipe(2, 2), [1, -2])
    with pytest.raises(ValueError, match="time of p2p is nan"):
        simulate(gpipe(2, 2), p2p=float("nan"))
    for times in ([1, 2], [1, 2, 3, 4, 5]):
        rule = f"{len(times)} times of W, but interleaved has 4 virtual stages"
        with pytest.raises(ValueError, match=rule):
            simulate(interleaved(2, 2), backward_weight=times)


@pytest.mark.verifies("xtrain.schedules.action:Schedule")
def test_stages_of_ranks_are_where_the_placement_says():
    v = SCHEDULES["zb_v"](3, 4)
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    loop = interleaved(3, 3, 3)
    assert loop.stages_of(1) == (1, 4, 7)
    mirror = dualpipe(4, 8)
    assert [mirror.stages_of(rank) for rank in range(4)] == [
        (0, 3),
        (1, 2),
        (1, 2),
        (0, 3),
    ]
    assert [mirror.rank_of(0, i) for i in (0, 3, 4, 7)] == [0, 0, 3, 3]


def test_large_schedules_are_played():
    schedule = zb_h1(64, 256)
    timeline = simulate(schedule)
    assert max(timeline.idle) == 63
    assert timeline.makespan == 3 * 256 + 63


def test_schedules_need_no_torch():
    code = "import sys, xtrain.schedules; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
