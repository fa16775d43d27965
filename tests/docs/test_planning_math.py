"""The pages on communication and compute math: claims in words, and published ones."""

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import (
    DTYPES,
    Accelerator,
    Layout,
    ModelShape,
    compute_bound_tokens,
)
from xtrain_docs.lectures.planning import (
    bandwidths,
    checked,
    communication,
    compute,
    transfers,
)


@pytest.mark.parametrize("check", checked.checks(), ids=lambda check: check.claim)
def test_published_claims_within_their_own_rounding(check):
    """Each within what it says; what disagrees with itself stays as far apart."""
    assert abs(check.deviation) <= check.error
    if check.error > 0.1:
        assert "disagree" in check.claim
        assert check.deviation > 0.12


def test_the_table_of_claims_shows_every_one_with_its_deviation():
    rows = checked.compute_checks().rows
    assert [row[0] for row in rows] == [check.claim for check in checked.checks()]
    by_name = {row[0]: row for row in rows}
    assert by_name["Llama 3 8B"][1:] == ["8 030 261 248", "8 030 261 248", "0"]
    assert by_name["Gopher 280B, MFU"][1:3] == ["32.5 %", "32.5 %"]
    assert by_name["GPT-3, 1024 A100"][3] == "-0.27 %"


def test_conventions_of_one_run_go_from_a_quarter_to_nearly_a_half():
    rows = page_rows("planning/compute-math.md", "what counts")
    shares = [float(row[4].split()[0]) for row in rows]
    assert 25 < min(shares) < 27 and 44 < max(shares) < 50
    by_name = {row[0]: row for row in rows}
    assert by_name["6 N, all parameters"][2] == "48.2 G"
    default = by_name["and all pairs of attention: **our default**"]
    assert default[3:] == ["0.0 %", "33.7 %"]  # what torchtitan's 33% is


def test_the_two_shares_of_a_bubble_in_the_table():
    rows = page_rows("planning/compute-math.md", "schedule")
    assert len({tuple(row[:4]) for row in rows}) == len(rows)
    for _, ranks, count, chunks, over, part in rows:
        above, below = (float(cell.split()[0]) for cell in (over, part))
        assert above > below
        assert below == pytest.approx(100 * above / (100 + above), abs=0.1), (
            ranks, count, chunks,
        )  # fmt: skip


def test_dualpipes_form_holds_for_equal_times_only():
    equal, other = (1, 2, 1, 3), (1, 2.2, 0.9, 3.2)
    assert compute.compute_dualpipe(False, *equal) == 6
    assert compute.compute_dualpipe(True, *equal) == 6
    assert compute.compute_dualpipe(False, *other) == pytest.approx(8.1)
    assert compute.compute_dualpipe(True, *other) == pytest.approx(7.2)


def test_numbers_of_parameters_on_the_page():
    assert compute.compute_active(True) / 1e9 == pytest.approx(37.55, abs=0.005)
    assert compute.compute_active(False) / 1e9 == pytest.approx(36.63, abs=0.005)
    with_it, without = map(compute.compute_prediction_module, (True, False))
    assert (with_it, without) == (11_610_068_224, 11_507_286_272)
    llama = ModelShape.preset("llama-3-8b").parameters
    assert compute.compute_listed_llama_2() == llama
    assert compute.compute_gpt3_in_palm() == pytest.approx(0.202, abs=5e-4)
    assert checked.compute_tied_table(True) == pytest.approx(39.178, rel=1.5e-3)
    assert checked.compute_true_mfu(12288, 96, 80, 2304, 148e12) == pytest.approx(
        0.356, abs=5e-4
    )


def test_a_device_of_the_405b_run_handles_what_its_step_says():
    seconds = compute.compute_step_seconds(16384, 400e12, 2048, "llama-3.1-405b")
    per_token = ModelShape.preset("llama-3.1-405b").flops_per_token(8192)
    assert seconds == pytest.approx(2**24 * per_token / (16384 * 400e12))


# ---------------------------------------------------------------------- communication


def test_the_model_goes_through_the_first_and_the_last_measurement():
    sizes = sorted(communication.A100_TIMES)
    assert communication.comm_model_error(sizes[0]) == pytest.approx(1, abs=0.01)
    assert communication.comm_model_error(sizes[-1]) == pytest.approx(1, abs=0.01)
    assert all(communication.comm_model_error(size) < 1 for size in sizes[1:-1])
    assert bandwidths.comm_bus_rate() / 1e9 == pytest.approx(234.89, abs=0.01)
    assert bandwidths.comm_algorithm_rate() / 1e9 == pytest.approx(134.22, abs=0.01)
    drawing = communication.alpha_beta_measured()
    assert drawing.count("<polyline") == 5 and "measured" in drawing


def test_what_the_page_says_of_dtypes():
    sent = transfers.comm_sent
    plain, one = (Layout(data=8, zero=stage) for stage in (0, 1))
    bf16, fp32 = "megatron-bf16", "ddp-autocast"
    assert sent("llama-3-8b", bf16, plain) == sent("llama-3-8b", fp32, plain)
    assert sent("llama-3-8b", bf16, one) < sent("llama-3-8b", fp32, one)
    assert transfers.comm_zero3_over_ddp("fsdp2", fp32) == pytest.approx(1)
    assert transfers.comm_zero3_over_ddp("zero16", "zero16") == pytest.approx(1.5)
    rows = page_rows("planning/communication-math.md", "8 ranks")
    assert [row[2] for row in rows[:3]] == ["56.2 GB", "56.2 GB", "84.3 GB"]
    assert len(rows) == 9
    assert {len(row) for row in rows} == {2 + len(DTYPES)}


def test_a_layer_sends_8_and_with_slices_10_activations():
    assert transfers.comm_layer_elements(False) == pytest.approx(8)
    assert transfers.comm_layer_elements(True) == pytest.approx(10)


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
