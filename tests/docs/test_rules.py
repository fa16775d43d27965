"""Rules of thumb: what the page says of each is what the search and estimate find."""

import re
from dataclasses import replace

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import (
    Layout,
    ModelShape,
    bubble_over_ideal,
    hardware_flops,
    search,
    traffic_per_step,
    zero_memory,
)
from xtrain.schedules import interleaved, one_f_one_b, simulate, zb_h1
from xtrain_docs import config
from xtrain_docs.lectures.planning import rules_of_thumb as rules
from xtrain_docs.lectures.planning.common import SEQUENCE
from xtrain_docs.lectures.planning.how_far_off import measured_run
from xtrain_docs.lectures.planning.index import BATCH, USABLE, fit_70b_layout

NAME = "planning/rules-of-thumb.md"
PAGE = (config.PAGES / NAME).read_text()
CANNOT_TELL = 1 / 5
"""What nine of ten published runs are about within."""
LARGE = "llama-3.1-405b"


def best(model: str, gpus: int):
    """The fastest layout of all."""
    return rules.rule_layouts(model, gpus)[0]


def alone(model: str, gpus: int):
    """The fastest with data parallelism alone."""
    return rules.rule_fastest(model, gpus, "data alone")


def only_data(one) -> bool:
    return rules.RULES["data alone"](one.layout)


def test_every_rule_has_a_part_and_a_verdict():
    parts = set(re.findall(r"^## .*\{#([\w-]+)\}", PAGE, re.MULTILINE))
    shown = re.findall(
        r"^\| \[(.*?)\]\(#([\w-]+)\) \| \*\*(.*?)\*\* \| \S", PAGE, re.MULTILINE
    )
    rows = [(part, rule, verdict) for rule, part, verdict in shown]
    assert len(rows) == 14 and "Fourteen rules" in PAGE
    assert {part for part, *_ in rows} == parts - {
        "all", "measured", "code", "misconceptions", "sources",
    }  # fmt: skip
    said = {rule: verdict for _, rule, verdict in rows}
    assert {rule for rule, verdict in said.items() if verdict == "wrong"} == {
        "Always recompute activations"
    }
    holds = {rule for rule, verdict in said.items() if verdict == "holds"}
    assert holds == {
        "7B to 13B: ZeRO-3 or FSDP",
        "13B to 70B: tensor and data ranks",
        "Pipeline and data ranks may be in other nodes",
    }


def test_layouts_are_those_of_the_whole_search():
    """Micro-batches of one sequence are within what the estimate can tell apart."""
    assert rules.shape_of("llama-2-13b").parameters == 13_015_864_320
    for model, gpus in (("llama-2-7b", 8), ("llama-3-70b", 32)):
        found = search(rules.shape_of(model), "h100", gpus, SEQUENCE, BATCH)
        assert found.best.seconds > 0.94 * best(model, gpus).seconds
    assert {one.verdict for one in rules.rule_layouts("llama-3-70b", 32)} == {"fits"}


def test_ddp_ends_below_seven_billion_and_stage_2_does_not():
    """Below 7B: DDP or ZeRO-2."""
    for recipe in ("zero16", "megatron18"):
        filled = [zero_memory(7 * 10**9, 8, stage, recipe) for stage in range(4)]
        assert filled[0] > USABLE > filled[1] > filled[2] > filled[3]
    assert rules.rule_layouts("llama-2-7b", 1) == ()
    for model, gpus in (("llama-2-7b", 8), ("llama-3-8b", 64)):
        kept = best(model, gpus)
        assert only_data(kept) and kept.layout.recompute == "none"
        assert rules.rule_longer(model, gpus, "stage 2") < CANNOT_TELL


def test_13_billion_want_data_ranks_alone():
    """7B to 13B: ZeRO-3 or FSDP."""
    for gpus, again in ((64, "none"), (8, "selective")):
        one = best("llama-2-13b", gpus)
        assert only_data(one) and one.layout.zero == 3
        assert one.layout.recompute == again


def test_70_billion_on_data_ranks_alone_are_no_worse_than_can_be_told():
    """13B to 70B: tensor and data ranks."""
    for gpus in (32, 64, 128, 256, 512):
        data = alone("llama-3-70b", gpus)
        assert data.layout.zero == 3 and data.layout.recomputed_layers > 40
        seconds = best("llama-3-70b", gpus).seconds
        assert seconds < data.seconds < (1 + CANNOT_TELL) * seconds
        kept = next(
            one for one in rules.rule_layouts("llama-3-70b", gpus)
            if one.layout.pipeline == one.layout.context == 1
        )  # fmt: skip
        assert kept.seconds < (1 + CANNOT_TELL) * seconds
    assert alone("llama-3-70b", 1024) is None  # of 512 sequences, as in the picture


def test_405_billion_do_not_fit_on_data_ranks_alone():
    """70B and more: three dimensions."""
    for gpus in (512, 1024):
        assert alone(LARGE, gpus) is None
        flat = best(LARGE, gpus).layout
        assert (flat.tensor, flat.pipeline, flat.zero) == (4, 1, 3)
        assert 0.3 < flat.recomputed_layers / 126 < 0.6
    assert 0 < rules.rule_longer(LARGE, 512, "pipeline") < CANNOT_TELL
    few, many = best("llama-3-70b", 64).layout, best("llama-3-70b", 512).layout
    assert few.tensor > 1 and few.context > 1 == many.tensor
    assert many.pipeline == 1 < many.context


def test_the_famous_layout_is_safe_and_seldom_the_fastest():
    """70B on 64 devices: TP8 PP2 DP4."""
    rows = page_rows(NAME, "device | devices")
    assert len(rows) == 7  # it fits everywhere
    assert [row[4] for row in rows].count("1") == 0
    late = {row[0]: [] for row in rows}
    for row in rows:
        late[row[0]].append(float(row[6].split()[0]) / 100)
    assert max(late["a100-80gb"]) < CANNOT_TELL
    saved = [late / (1 + late) for late in late["h100"]]
    assert min(saved) > 0.17 and max(saved) < 0.28  # a fifth to a quarter
    assert all("ZeRO\u20111" in row[2] for row in rows)
    assert sum("TP2" in row[5] for row in rows) > len(rows) / 2
    shape, tensor = ModelShape.preset("llama-3-70b"), []
    for ranks in (4, 8):
        layout = Layout(tensor=ranks, data=64 // ranks, micro_batches=ranks * 8,
                        sequence_parallel=True)  # fmt: skip
        sent = traffic_per_step(shape, layout, SEQUENCE)
        tensor.append(sum(t.sent for t in sent if t.axis == "tensor"))
    assert tensor[0] < tensor[1] / 2


def test_the_fastest_layout_of_the_interview():
    layout = best("llama-3-70b", 64).layout
    assert (layout.tensor, layout.pipeline, layout.context, layout.zero) == (2, 1, 2, 3)
    assert CANNOT_TELL < rules.rule_longer("llama-3-70b", 64, "example") < 1 / 3


def test_tensor_ranks_stay_on_fast_links_and_even_there_few():
    """Never across nodes."""
    share = rules.rule_tensor_share
    for device in ("h100", "b200"):
        assert share(16, device, 8) > 1.5 * share(8, device, 8)
    assert share(16, "b200", 72) < 0.95 * share(16, "b200", 8)
    assert share(8, "b200", 72) == pytest.approx(share(8, "b200", 8), rel=0.15)
    assert share(8, "b200", 72) < share(16, "b200", 72) < share(32, "b200", 72)
    assert rules.rule_longer("llama-3-70b", 64, "across nodes") > CANNOT_TELL


def test_pipeline_and_data_ranks_wait_little_across_nodes():
    far = rules.rule_example("pipeline") + rules.rule_example("data")
    assert 0 < far < 0.02 < rules.rule_example("tensor")


def test_half_as_much_again_in_one_dtype_and_one_micro_batch():
    volume = rules.rule_volume
    for same in ("zero16", "ddp-autocast"):
        assert [volume(stage, 1, same) for stage in (1, 2, 3)] == [1, 1, 1.5]
    mixed = "megatron-bf16"
    assert [volume(stage, 1, mixed) for stage in (1, 2, 3)] == [0.75, 0.75, 1]
    for dtypes in ("zero16", mixed):
        assert volume(1, 8, dtypes) == volume(1, 1, dtypes)
        assert volume(2, 8, dtypes) > 4 and volume(3, 8, dtypes) == 8 * volume(
            3, 1, dtypes
        )


def test_stages_2_and_3_wait_in_a_pipeline():
    """No ZeRO-2 or 3 with a pipeline."""
    of = rules.rule_example
    assert of("data", 1) < 0.01 < 0.1 < of("data", 3) < of("data", 2) < 1 / 3
    assert of("GiB", 1) > of("GiB", 2) > of("GiB", 3)
    batches = fit_70b_layout().micro_batches
    scattered, gathered = of("sent", 1) * 4 / 6, of("sent", 1) * 2 / 6
    once = scattered * batches
    assert of("sent", 2) == pytest.approx(once + gathered)
    assert of("sent", 3) == pytest.approx(once + 2 * gathered * batches)


def test_shard_grad_op_holds_less_and_gathers_more_often_than_stage_2():
    rows = {row[0]: row[1:] for row in page_rows(NAME, "strategy")}
    mode, stage = rows["`SHARD_GRAD_OP`"], rows["ZeRO\u20112"]
    assert mode[0] == rows["`FULL_SHARD`"][0] != stage[0]
    assert mode[1] == stage[1] and mode[2] != stage[2]
    plain = rows["`NO_SHARD`"][0]
    assert float(plain) > float(stage[0]) > float(mode[0])


def test_what_fits_without_recomputation_is_faster_without():
    """Always recompute."""
    rows = page_rows(NAME, "model")
    assert len(rows) == 9 == len(rules.SIZES)
    assert [(row[0], int(row[1])) for row in rows] == [*rules.SIZES]
    assert 4 <= rules.rule_recomputing() <= 8
    for model, count, *_ in rows:
        if rules.rule_fastest(model, int(count), "kept"):
            assert 0 < rules.rule_cheap(model, int(count)) < 0.03
            assert 0.25 < rules.rule_cheap_frees(model, int(count)) < 0.6
        again, once = (
            hardware_flops(rules.shape_of(model), SEQUENCE, 1, way, causal=True)
            for way in ("full", "none")
        )
        assert 1.3 < again / once < 4 / 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_four_micro_batches_a_rank_leave_almost_a_quarter(ranks):
    count = 4 * ranks
    share = bubble_over_ideal("one_f_one_b", ranks, count)
    assert share == pytest.approx((ranks - 1) / count) and share < 1 / 4
    assert simulate(one_f_one_b(ranks, count)).bubble_over_ideal == pytest.approx(share)
    finer = bubble_over_ideal("interleaved", ranks, count, 2)
    played = simulate(interleaved(ranks, count, 2)).bubble_over_ideal
    assert finer == pytest.approx(share / 2) == played
    split = bubble_over_ideal("zb_h1", ranks, count)
    assert split == pytest.approx(share / 3)
    assert simulate(zb_h1(ranks, count)).bubble_over_ideal == pytest.approx(split)
    fewest = 20 * (ranks - 1)
    assert bubble_over_ideal("one_f_one_b", ranks, fewest) == pytest.approx(1 / 20)


def test_larger_micro_batches_wait_longer_in_a_pipeline_and_gather_less_without():
    rows = page_rows(NAME, "layout")
    assert [row[1] for row in rows] == [
        f"{size} x {count // size}" for count in (128, 4) for size in (1, 2, 4)
    ]
    bases = (
        Layout(tensor=4, pipeline=8, data=2, zero=1, micro_batches=128,
               sequence_parallel=True, recompute="full"),
        Layout(data=64, zero=3, micro_batches=4, recompute="full"),
    )  # fmt: skip
    piped, flat = (
        [replace(base, micro_batch=size, micro_batches=base.micro_batches // size)
         for size in (1, 2, 4)]
        for base in bases
    )  # fmt: skip
    assert {layout.batch for layout in piped + flat} == {256}
    found = [rules.rule_estimate(layout) for layout in piped]
    bubbles = [one.parts["bubble"] for one in found]
    assert bubbles[2] > 1.9 * bubbles[1] > 3.6 * bubbles[0]
    assert found[0].mfu > found[1].mfu > found[2].mfu
    assert found[0].memory.total < found[1].memory.total < found[2].memory.total
    sent = [rules.sent_by_data_ranks(layout) for layout in flat]
    assert sent[0] == pytest.approx(2 * sent[1]) == pytest.approx(4 * sent[2])
    more = rules.rule_estimate(replace(flat[2]))
    assert more.parts["bubble"] == 0 and more.verdict == "does not fit"


def test_slices_of_the_sequence_save_memory_and_send_a_quarter_more():
    assert rules.rule_sequence_parallel("kept") < 1 / 2
    assert rules.rule_sequence_parallel("sent") == pytest.approx(10 / 8, rel=0.01)


def test_the_measured_pairs_differ_in_what_the_rows_say():
    rows = page_rows(NAME, "rule | pair")
    assert len(rows) == 5
    pairs = re.findall(r'\("[^"]+", "(\w+-\d+)", "(\w+-\d+)"', PAGE)
    assert len(pairs) == 5
    for fast, slow in pairs:
        one, two = measured_run(fast), measured_run(slow)
        assert one.measured > 1.1 * two.measured and one.layout != two.layout
        assert (one.model, one.layout.gpus) == (two.model, two.layout.gpus)
