"""The page on memory math: real runs beside the plan, and what its prose claims."""

from dataclasses import replace

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import (
    Layout,
    ModelShape,
    device_parameters,
    memory_over_step,
    memory_per_device,
    state_memory,
)
from xtrain.plan.memory import StateMemory
from xtrain_docs.lectures.planning import measured_memory, memory_math
from xtrain_docs.lectures.planning.measured_memory import (
    CASES,
    Case,
    measured,
    predicted,
)

GIB = 2**30
KINDS = ("weights", "gradients", "optimizer")
MODEL = 17493  # 4 layers of 3822, and 105 rows of 21
VERIFIED = (
    "xtrain.plan.device_memory:memory_per_device",
    "xtrain.plan.memory:state_memory",
    "xtrain.model.decoder:XtrainModel",
    "xtrain.data_parallel.ddp:DistributedDataParallel",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.plan.decoder_activations:decoder_activations",
    "xtrain.plan.decoder_activations:decoder_layer_activations",
    "xtrain.plan.device_memory:held_micro_batches",
)
BY_HAND = {  # name -> bytes of weights, gradients, optimizer of rank 0
    "one device": (4 * MODEL, 4 * MODEL, 8 * MODEL),
    "one device, bf16": (2 * MODEL, 2 * MODEL, 12 * MODEL),
    "DDP, bf16": (2 * MODEL, 4 * MODEL + 4, 12 * MODEL),
    "ZeRO-1, bf16": (2 * 17496, 2 * MODEL, 12 * 4374),
    "ZeRO-2, bf16": (2 * 17496, 4 * 4374, 12 * 4374),
    "FSDP": tuple(n * (4 * 956 + 552) for n in (4, 4, 8)),
    "context ranks": (4 * MODEL, 4 * MODEL, 8 * MODEL),
}


def with_padding(case: Case, rank: int) -> StateMemory:
    """The prediction, with what our wrappers put into their flat tensors."""
    held, layout = predicted(case, rank), case.layout
    plain = StateMemory(int(held.weights), int(held.gradients + held.main_gradients),
                        int(held.master + held.moments))  # fmt: skip
    own = device_parameters(case.shape, layout, case.stage(rank))
    if case.wrapper == "ddp":
        return replace(plain, gradients=plain.gradients + 4)  # the spare number, fp32
    if case.wrapper == "fsdp":  # every layer is padded by itself, moments not
        units = [own.block] * (own.dense_layers + own.moe_layers) + [own.root]
        shards = [state_memory(unit, layout.data, 3, case.recipe) for unit in units]
        optimizer = sum(shard.optimizer for shard in shards)
        inner = case.size("context") * case.size("tensor")
        if rank // inner % layout.data == layout.data - 1:  # it has the padding
            padding = sum(-unit % layout.data for unit in units)
            optimizer -= state_memory(padding, 1, 0, case.recipe).optimizer
        weights, gradients = (
            sum(getattr(shard, kind) for shard in shards) for kind in KINDS[:2]
        )
        return StateMemory(weights, gradients, optimizer)
    if case.wrapper:  # flat weights; in a pipeline and with experts gradients, too
        ranks = layout.expert_data if layout.expert > 1 else layout.data
        padded = own.total + -own.total % ranks
        whole = state_memory(padded, ranks, layout.zero, case.recipe)
        if layout.expert * layout.pipeline > 1:
            return whole
        return replace(plain, weights=whole.weights)
    return plain


@pytest.mark.verifies(*VERIFIED)
def test_every_state_is_predicted_to_the_byte(on_ranks):
    """Every run, every rank, every kind; the exceptions are those the page names.

    Activations of the same runs are as predicted, but for ids.
    """
    for name, case in CASES.items():
        found = measured(case)
        assert len(found) == case.ranks
        for rank, one in enumerate(found):
            right = with_padding(case, rank)
            assert [one[kind] for kind in KINDS] == [
                getattr(right, kind) for kind in KINDS
            ], (name, rank)
            more = right.total - predicted(case, rank).states
            if not case.wrapper:
                assert more == 0, name
            elif case.layout.expert == 1:  # padding: a few elements of each unit
                assert abs(more) <= 5 * 3 * 16, (name, rank, more)
            kept = measured_memory.predicted_activations(case, rank)
            assert (kept is None) == ("expert" in name)
            ids = 4 * 8 * 2 * 24  # of tokens or labels, of the micro-batches in flight
            assert kept is None or 0 <= one["activations"] - kept <= ids + 16
    for name, right in BY_HAND.items():
        assert tuple(measured(CASES[name])[0][kind] for kind in KINDS) == right, name
    last = measured(CASES["FSDP"])[3]
    assert last["optimizer"] == 8 * (4 * 956 + 552 - (4 * 2 + 3))
    own = CASES["expert ranks, ZeRO-1, bf16"]
    expert = measured(own)[0]
    assert expert["optimizer"] == 12 * (expert["weights"] // 2 // own.size("expert"))
    first, last = measured(CASES["pipeline"])
    assert first["activations"] > 1.5 * last["activations"]
    one, other = measured(CASES["expert ranks"])
    assert one["activations"] != other["activations"]
    assert (
        len(measured_memory.measured_runs()) == len(CASES) + 2
    )  # two positions, twice


def test_which_moment_is_the_fullest():
    """Long sequences: the end of forward. Short ones: the optimizer's step."""
    shape, layout = ModelShape.preset("llama-3-8b"), Layout(data=8, zero=1)
    for sequence, fullest in ((8192, "end of forward"), (512, "in the optimizer")):
        phases = memory_over_step(shape, layout, sequence, recipe="zero16")
        assert max(phases, key=lambda name: phases[name].total) == fullest
    drawn, phases = memory_math.memory_phases(), memory_math.step_phases(1)
    for memory_then in phases.values():
        assert f"{memory_then.total / GIB:.3g} GiB" in drawn
    assert max(phases, key=lambda name: phases[name].total) == "end of forward"


def test_the_table_of_phases_has_every_part():
    rows = page_rows("planning/memory-math.md", "GiB | at rest")
    phases = memory_math.step_phases(3)
    *parts, together = rows
    held = {
        k for memory in phases.values() for k, size in memory.parts().items() if size
    }
    assert {row[0].replace(" ", "_") for row in parts} == held
    assert together[1:] == [f"{memory.total / GIB:.2f}" for memory in phases.values()]


def test_what_stage_3_gathers_is_more_than_its_states_on_many_ranks():
    shape = ModelShape.preset("llama-3-8b")
    held = memory_per_device(shape, Layout(data=64, zero=3), 8192)
    assert held.gathered + held.root > held.states


def test_a_layer_of_405b_and_the_run_of_the_playbook():
    layer = memory_math.layer_share("llama-3.1-405b", 8192)
    assert layer == pytest.approx(31.75, abs=0.05)
    assert memory_math.playbook_run_bytes() / GIB == pytest.approx(62.8, abs=0.05)


def test_positions_differ_in_activations_and_logits():
    rows = page_rows("planning/memory-math.md", "schedule")
    assert [row[1] for row in rows] == ["first", "middle", "last"] * 3
    by_name = {(row[0], row[1]): row for row in rows}
    first, last = (float(by_name["1F1B", at][4]) for at in ("first", "last"))
    assert first / last == pytest.approx(4, rel=0.01)  # and the head's inputs
    assert all(row[5] == "–" for row in rows if row[1] != "last")
    one, gpipe = (float(by_name[n, "first"][4]) for n in ("1F1B", "GPipe"))
    assert gpipe / one == pytest.approx(16 / 4, rel=0.001)


def test_passes_over_the_model():
    """Two, two, two, three; two if stage 3 keeps the weights; K + 1 in stage 2."""
    passes = memory_math.step_passes
    assert [passes(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert passes(3, kept=True) == 2
    assert [passes(2, micro_batches=k) for k in (2, 4)] == [3, 5]
    assert passes(3, ranks=3) == 3
