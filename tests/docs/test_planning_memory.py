"""The page on memory math: real runs beside the plan, and what its prose claims."""

import copy

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import Layout, ModelShape, memory_over_step, memory_per_device
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.planning import (
    measured_activations,
    measured_memory,
    memory,
)
from xtrain_docs.lectures.planning import memory_sources as sources
from xtrain_docs.lectures.planning.runs_memory_cases import CASES, SEQUENCE, Case

GIB = 2**30
MODEL, LAYER, ROOT = 17493, 3822, 2205  # 4 layers, and 105 rows of 21
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


@pytest.mark.verifies(*VERIFIED)
def test_every_state_is_predicted_to_the_byte(on_ranks):
    """Every run, every rank, every kind; the exceptions are those the page names.

    Activations are held to two percent in the same runs.
    """
    for name, case in CASES.items():
        found = measured_memory.check_states(case)
        assert len(found) == case.ranks
        for rank, one in enumerate(found):
            plan = memory_per_device(
                case.shape, case.layout, SEQUENCE, rank=case.pipeline_rank(rank),
                recipe=case.recipe,
            )  # fmt: skip
            more = sum(one[kind] for kind in measured_memory.KINDS) - plan.states
            if not case.wrapper:
                assert more == 0, name
            elif case.layout.expert == 1:  # padding: a few elements of each unit
                assert abs(more) <= 5 * 3 * 16, (name, rank, more)
    for name, right in BY_HAND.items():
        one = measured_memory.measured(CASES[name])[0]
        assert tuple(one[kind] for kind in measured_memory.KINDS) == right, name
    last = measured_memory.measured(CASES["FSDP"])[3]
    assert last["optimizer"] == 8 * (4 * 956 + 552 - (4 * 2 + 3))
    expert = measured_memory.measured(CASES["expert ranks, ZeRO-1, bf16"])[0]
    own = CASES["expert ranks, ZeRO-1, bf16"]
    assert expert["optimizer"] == 12 * (expert["weights"] // 2 // own.size("expert"))
    rows = measured_memory.measured_states().rows
    assert len(rows) == len(CASES) + 2  # two positions of two pipelines
    for row in rows:
        assert bool(row[-1]) == (row[-2] != "0"), row
    activations_are_within_two_percent()


def activations_are_within_two_percent():
    """Where there is a formula; no rank of a run with experts is like the other."""
    rows = measured_activations.measured_activations().rows
    assert [row[0] for row in rows if row[3] == "–"] == [
        "expert ranks", "expert ranks, ZeRO-1, bf16"
    ]  # fmt: skip
    first, last = measured_memory.measured(CASES["pipeline"])
    assert first["activations"] > 1.5 * last["activations"]
    one, other = measured_memory.measured(CASES["expert ranks"])
    assert one["activations"] != other["activations"]


@pytest.mark.parametrize("kind", [*measured_memory.KINDS, "activations"])
def test_another_number_of_bytes_is_refused(monkeypatch, kind):
    case = Case()
    (rank,) = [measured_memory.with_padding(case, 0)]
    right = {name: getattr(rank, name) for name in measured_memory.KINDS}
    right["activations"] = int(measured_activations.kept(case, 0) or 0)
    found = {"one device": right}
    monkeypatch.setattr(runs, "remembered", lambda *_: [found])
    check = measured_memory.check_states
    if kind == "activations":
        check = measured_activations.check_activations
    assert check(case) == [right]
    wrong = copy.deepcopy(found)
    wrong["one device"][kind] += 1 if kind != "activations" else right[kind] // 10
    monkeypatch.setattr(runs, "remembered", lambda *_: [wrong])
    with pytest.raises(EvidenceError, match=f"bytes of {kind}"):
        check(case)


def test_which_moment_is_the_fullest():
    """Long sequences: the end of forward. Short ones: the optimizer's step."""
    shape, layout = ModelShape.preset(memory.DENSE), Layout(data=8, zero=1)
    for sequence, fullest in ((8192, "end of forward"), (512, "in the optimizer")):
        phases = memory_over_step(shape, layout, sequence, recipe="zero16")
        assert max(phases, key=lambda name: phases[name].total) == fullest
    drawn = memory.memory_phases(zero=1)
    phases = memory.phases_of(1, "zero16", "full")
    for memory_then in phases.values():
        assert f"{memory_then.total / GIB:.3g} GiB" in drawn
    assert max(phases, key=lambda name: phases[name].total) == "end of forward"


def test_what_stage_3_gathers_is_more_than_its_states_on_many_ranks():
    held = memory_per_device(
        ModelShape.preset(memory.DENSE), Layout(data=64, zero=3), 8192
    )
    assert held.gathered + held.root > held.states


def test_recipes_are_those_of_the_sources():
    rows = {
        row[0].strip("`"): row for row in page_rows("planning/memory-math.md", "recipe")
    }
    totals = {name: int(row[6]) for name, row in rows.items()}
    assert sorted(totals.values()) == [10, 12, 16, 16, 18, 20]
    for name, split in (("zero16", "4 + 12/N"), ("fp32", "8 + 8/N"),
                        ("megatron18", "6 + 12/N"), ("fp32_accum20", "8 + 12/N"),
                        ("no master", "4 + 8/N")):  # fmt: skip
        assert rows[name][7] == split
    assert rows["zero16"][8] == "112" and rows["fp32_accum20"][8] == "140"


def test_the_sources_numbers_come_out_of_their_formulas():
    """Printed values: the Playbook's figures, and Korthikanti et al., section 4.3."""
    assert sources.gpt_formula_gib("llama-3-8b") == pytest.approx(25.98, abs=0.005)
    found = sources.gpt_formula_gib("llama-3.1-405b")
    assert found == pytest.approx(1519.99, abs=0.005)
    assert 0.0050 < sources.korthikanti_extra_share() < 0.0057
    assert sources.layer_share("llama-3.1-405b", 8192) == pytest.approx(31.75, abs=0.05)
    assert sources.full_recompute_gib(False) == 8 * sources.full_recompute_gib(True)
    assert sources.playbook_run_gib() == pytest.approx(62.8, abs=0.05)


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
    assert [sources.step_passes(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert sources.step_passes(3, kept=True) == 2
    assert [sources.step_passes(2, micro_batches=k) for k in (2, 4)] == [3, 5]
    assert sources.step_passes(3, ranks=3) == 3
