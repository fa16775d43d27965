"""The pages on communication and compute math: claims in words, and published ones."""

from dataclasses import replace

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import (
    DTYPES,
    Accelerator,
    Layout,
    ModelShape,
    collective_time,
    compute_bound_tokens,
)
from xtrain_docs.lectures.planning import communication_math
from xtrain_docs.lectures.planning.common import step_bytes
from xtrain_docs.lectures.planning.compute_math import dualpipe_idle


def test_conventions_of_one_run_go_from_a_quarter_to_nearly_a_half():
    rows = page_rows("planning/compute-math.md", "what counts")
    shares = [float(row[4].split()[0]) for row in rows]
    assert 25 < min(shares) < 27 and 44 < max(shares) < 50
    by_name = {row[0]: row for row in rows}
    assert by_name["6 N, all parameters"][2] == "48.2 G"
    default = by_name["and all pairs of attention: **our default**"]
    assert default[3:] == ["0.0 %", "33.7 %"]  # what torchtitan's 33% is


def test_published_shares_are_ours_but_for_the_run_that_disagrees():
    *rows, last = page_rows("planning/compute-math.md", "run | MFU")
    assert len(rows) == 9 and "disagree" in last[0]
    for row in rows:
        assert abs(float(row[3].removesuffix(" %"))) < 2.5, row
    assert last[3] == "12.31 %"


def test_dualpipes_form_holds_for_equal_times_only():
    equal, other = (1, 2, 1, 3), (1, 2.2, 0.9, 3.2)
    assert dualpipe_idle(False, *equal) == 6
    assert dualpipe_idle(True, *equal) == 6
    assert dualpipe_idle(False, *other) == pytest.approx(8.1)
    assert dualpipe_idle(True, *other) == pytest.approx(7.2)


def test_a_list_has_the_sizes_of_llama_3_8b_for_llama_2_7b():
    listed = replace(ModelShape.preset("llama-2-7b"), vocab_size=128256,
                     num_key_value_heads=8, intermediate_size=14336)  # fmt: skip
    assert listed.parameters == ModelShape.preset("llama-3-8b").parameters


def test_sizes_of_deepseek_v3_that_the_page_takes_for_granted():
    shape = ModelShape.preset("deepseek-v3")
    sizes = shape.vocab_size, shape.hidden_size, shape.num_hidden_layers
    assert sizes == (129280, 7168, 61)
    assert shape.parameters_of_layer(60) == 11_507_286_272


# ---------------------------------------------------------------------- communication


def test_the_model_goes_through_the_first_and_the_last_measurement():
    line = communication_math.a100_alpha_beta()
    shares = [
        collective_time("ring_all_reduce", size, 8, *line) / (us * 1e-6)
        for size, us in communication_math.A100_TIMES.items()
    ]
    assert [shares[0], shares[-1]] == pytest.approx([1, 1], abs=0.01)
    assert max(shares[1:-1]) < 1


def test_what_the_page_says_of_dtypes():
    plain, one = (Layout(data=8, zero=stage) for stage in (0, 1))
    bf16, fp32 = "megatron-bf16", "ddp-autocast"
    sent = {(d, lay): step_bytes("llama-3-8b", d, lay)
            for d in (bf16, fp32) for lay in (plain, one)}  # fmt: skip
    assert sent[bf16, plain] == sent[fp32, plain]
    assert sent[bf16, one] < sent[fp32, one]
    third = Layout(data=8, zero=3)
    assert step_bytes("llama-3-8b", "fsdp2", third) == sent[fp32, plain]
    rows = page_rows("planning/communication-math.md", "8 ranks")
    assert [row[2] for row in rows[:3]] == ["56.2 GB", "56.2 GB", "84.3 GB"]
    assert len(rows) == 9
    assert {len(row) for row in rows} == {2 + len(DTYPES)}


def test_what_hides_what():
    """Half the rate, half the tokens; a seam hides behind less than a layer."""
    device = Accelerator.preset("h100")
    full = compute_bound_tokens(device.flops, device.network.bandwidth)
    assert compute_bound_tokens(device.flops / 2, device.network.bandwidth) == full / 2
    rows = {
        row[0]: row for row in page_rows("planning/communication-math.md", "traffic")
    }
    assert rows["gradients in fp32, all-reduce"][3] == "4400"
    assert float(rows["activations between stages"][4]) < 1
    inside, across = map(float, rows["sums of tensor ranks"][3:])
    assert inside > 8 > 2 > across  # a node's tensor ranks, and no two across nodes


def test_published_formulas_beside_ours():
    rows = page_rows("planning/communication-math.md", "what |")
    theirs, ours = ([row[i].replace(" ", "") for row in rows] for i in (2, 3))
    assert (theirs[0], ours[0]) == ("25165824", "176160768")
    assert int(ours[0]) == 7 * int(theirs[0])
    assert float(ours[2]) == pytest.approx(2 * float(theirs[2]), rel=1e-3)
    assert float(ours[3]) == pytest.approx(2 * float(theirs[3]), rel=5e-3)
    assert theirs[1].endswith("G")  # a ratio of 75 thousand million
    device, ratio = Accelerator.preset("h100"), 7 / 8 / 8192
    expected = ratio * device.flops / device.network.bandwidth
    assert float(ours[1]) == pytest.approx(expected, rel=2e-3)


def test_drops_of_throughput_are_those_that_the_playbook_prints():
    """3B model, tensor ranks 2 to 32: 8 values, within 0.2% of the printed ones."""
    printed = {
        "tensor": (10.8, 12.2, 42.7, 65.6),
        "tensor and sequence": (5.0, 19.1, 43.4, 41.4),
    }
    rows = page_rows("planning/communication-math.md", "tensor ranks")
    assert [row[0] for row in rows] == ["2", "4", "8", "16", "32"]
    for column, drops in zip((2, 4), printed.values(), strict=True):
        first, *found = (row[column] for row in rows)
        assert first == "–"
        assert found == [f"-{drop} %" for drop in drops]
