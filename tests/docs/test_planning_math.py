"""The pages on communication and compute math: claims in words, and published ones."""

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import (
    DTYPES,
    Accelerator,
    Layout,
    collective_time,
    compute_bound_tokens,
)
from xtrain_docs.lectures.planning import communication_math
from xtrain_docs.lectures.planning.common import step_bytes


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
