"""FLOPs of a step, MFU and HFU, days of training: the papers' own figures."""

from dataclasses import replace

import pytest

from tests.plan.test_published import gpt
from xtrain.plan import (
    ModelShape,
    attention_flops,
    compute_bound_mixed,
    compute_bound_ranks,
    compute_bound_tokens,
    hardware_flops,
    layer_forward_flops,
    model_flops,
    training_days,
    utilization,
)
from xtrain.plan.published import GPT_3

MODEL = "xtrain.plan.throughput:model_flops"
HARDWARE = "xtrain.plan.throughput:hardware_flops"
SHARE = "xtrain.plan.throughput:utilization"
A100 = 312e12
# heads, hidden, layers; batch, devices (Korthikanti et al., 2022, table 3)
KORTH = {
    "22B": ((6144, 64, 48), 4, 8),
    "175B": ((12288, 96, 96), 64, 64),
    "530B": ((20480, 128, 105), 280, 280),
    "1T": ((25600, 160, 128), 512, 512),
}


def appendix_a(h: int, layers: int, batch: int, recompute: str) -> float:
    """Korthikanti et al., 2022, appendix A: FLOPs of a step, as printed."""
    s, v = 2048, 51200
    if recompute == "full":
        return (
            96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
        )
    attention = s / (6 * h) if recompute == "none" else s / (3 * h)
    return 72 * batch * s * layers * h * h * (1 + attention + v / (12 * layers * h))


@pytest.mark.verifies(MODEL, HARDWARE)
@pytest.mark.parametrize("name", KORTH)
def test_flops_of_the_papers_appendix(name):
    (h, heads, layers), batch, _ = KORTH[name]
    shape = gpt(h, heads, layers)
    arguments = shape, 2048, batch
    assert model_flops(*arguments) == pytest.approx(
        appendix_a(h, layers, batch, "none"), rel=1e-12
    )
    assert hardware_flops(*arguments, "full") == pytest.approx(
        appendix_a(h, layers, batch, "full"), rel=1e-12
    )
    as_printed = hardware_flops(*arguments, "selective", attention_passes=3)
    assert as_printed == pytest.approx(
        appendix_a(h, layers, batch, "selective"), rel=1e-12
    )


@pytest.mark.verifies(HARDWARE, SHARE)
@pytest.mark.parametrize(
    ("name", "seconds", "mfu", "hfu", "error"),
    [
        ("22B", 1.10, 41.5, 43.7, 4e-3),
        ("175B", 13.75, 51.4, 52.8, 1e-3),
        ("530B", 37.83, 56.0, 57.0, 5e-3),
        ("1T", 71.49, 56.3, 57.0, 5e-3),
    ],
)
def test_table_5_of_the_paper(name, seconds, mfu, hfu, error):
    (h, heads, layers), batch, gpus = KORTH[name]
    arguments = gpt(h, heads, layers), 2048, batch
    found = utilization(model_flops(*arguments), seconds, gpus, A100)
    assert 100 * found == pytest.approx(mfu, rel=error)
    done = hardware_flops(*arguments, "selective", attention_passes=3)
    assert 100 * utilization(done, seconds, gpus, A100) == pytest.approx(hfu, rel=error)
    once = hardware_flops(*arguments, "selective")
    assert model_flops(*arguments) < once < done


@pytest.mark.verifies(HARDWARE)
@pytest.mark.parametrize(
    ("h", "heads", "layers", "percent", "error"),
    [(12288, 96, 96, 2.7, 5e-3), (20480, 128, 105, 1.6, 0.03)],
)
def test_what_selective_recomputation_costs(h, heads, layers, percent, error):
    """The paper's 2.7% and 1.6% charge attention once more as a whole, backward too."""
    arguments = gpt(h, heads, layers), 2048, 1
    whole = model_flops(*arguments)
    printed = hardware_flops(*arguments, "selective", attention_passes=3) / whole - 1
    assert 100 * printed == pytest.approx(percent, rel=error)
    forward_alone = hardware_flops(*arguments, "selective") / whole - 1
    assert forward_alone == pytest.approx(printed / 3)


@pytest.mark.verifies(HARDWARE, SHARE)
def test_the_share_of_the_peak_of_megatrons_table_1_counts_recomputation():
    """148 and 163 TF a device are 47 and 52% with it; 35.6 and 39.2% without."""
    for (h, heads, layers), batch, gpus, rate, true_mfu in (
        ((12288, 96, 80), 2304, 1536, 148e12, 35.6),
        ((25600, 160, 128), 3072, 3072, 163e12, 39.2),
    ):
        arguments = gpt(h, heads, layers), 2048, batch
        seconds = hardware_flops(*arguments, "full") / (rate * gpus)
        found = utilization(model_flops(*arguments), seconds, gpus, A100)
        assert 100 * found == pytest.approx(true_mfu, abs=0.06)


PALM = ModelShape(
    vocab_size=256_000, hidden_size=18432, intermediate_size=73728,
    num_hidden_layers=118, num_attention_heads=48, num_key_value_heads=1, head_dim=256,
)  # fmt: skip


@pytest.mark.verifies("xtrain.plan.throughput:attention_flops", SHARE)
def test_palms_own_utilization():
    """6 N + 12 L a d s; N = 540.35 B is given, as the paper counts it."""
    attention = 3 * attention_flops(PALM, 2048)
    assert attention == 12 * 118 * 48 * 256 * 2048
    for per_token, percent in ((6 * 540.35e9 + attention, 46.2), (6 * 540.35e9, 45.7)):
        found = 100 * utilization(238.3e3 * per_token, 1.0, 6144, 275e12)
        assert found == pytest.approx(percent, rel=7e-4)


@pytest.mark.verifies("xtrain.plan.throughput:attention_flops", SHARE)
def test_mt_nlg_in_palms_appendix():
    shape = gpt(20480, 128, 105)
    attention = 3 * attention_flops(shape, 2048)
    for per_token, percent in ((6 * 530e9 + attention, 30.2), (6 * 530e9, 29.7)):
        found = 100 * utilization(65.43e3 * per_token, 1.0, 2240, A100)
        assert found == pytest.approx(percent, rel=5e-3)


@pytest.mark.verifies(MODEL, SHARE)
@pytest.mark.parametrize(
    ("tokens", "percent", "error"), [(5762, 33, 0.025), (6667, 39, 2e-3)]
)
def test_torchtitan_on_eight_h100(tokens, percent, error):
    per_token = model_flops(ModelShape.preset("llama-3-8b"), 8192, 1) / 8192
    found = 100 * utilization(tokens * per_token, 1.0, 1, 989e12)
    assert found == pytest.approx(percent, rel=error)


@pytest.mark.verifies("xtrain.plan.throughput:training_days")
@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "achieved", "days", "error"),
    [(175e9, 300e9, 1024, 140e12, 34, 4e-3), (1008e9, 450e9, 3072, 163e12, 84, 2e-3)],
)
def test_days_of_training(parameters, tokens, gpus, achieved, days, error):
    found = training_days(parameters, tokens, gpus, achieved)
    assert found == pytest.approx(days, rel=error)
    without = training_days(parameters, tokens, gpus, achieved, "none")
    assert without == pytest.approx(found * 6 / 8)


@pytest.mark.verifies(HARDWARE)
@pytest.mark.parametrize(
    ("sizes", "gpus", "teraflops", "days"),
    [  # Narayanan et al., 2021, table 2: PTD-P, then ZeRO-3
        ((12288, 96, 96), 384, 153, 84),
        ((12288, 96, 96), 1536, 141, 23),
        ((20480, 128, 105), 560, 171, 156),
        ((20480, 128, 105), 2240, 159, 42),
        ((12288, 96, 96), 384, 144, 90),
        ((12288, 96, 96), 768, 88, 74),
        ((12288, 96, 96), 1536, 44, 74),
        ((20480, 128, 105), 640, 138, 169),
        ((20480, 128, 105), 1120, 98, 137),
        ((20480, 128, 105), 2240, 48, 140),
    ],
)
def test_days_of_megatrons_table_2(sizes, gpus, teraflops, days):
    """Of 300 B tokens with full recomputation: its own formula, not 8 T P / (n X)."""
    per_token = hardware_flops(gpt(*sizes), 2048, 1, "full") / 2048
    found = per_token * 300e9 / (gpus * teraflops * 1e12) / 86400
    assert found == pytest.approx(days, rel=9e-3)


@pytest.mark.verifies(MODEL)
def test_six_flops_a_parameter_and_token():
    """The totals that papers print: 3.14e23 (3640 PF-days) and 3.8e25."""
    assert 6 * GPT_3.parameters * 300e9 == pytest.approx(3.14e23, rel=1.1e-3)
    total = 6 * GPT_3.parameters * 300e9 / 1e15 / 86400
    assert total == pytest.approx(3640, rel=1.5e-3)
    llama = ModelShape.preset("llama-3.1-405b")
    assert pytest.approx(3.8e25, rel=3e-3) == 6 * 405e9 * 15.6e12
    assert 6 * llama.parameters * 15.6e12 == pytest.approx(3.8e25, rel=3e-3)
    # Only what is multiplied counts: the head, not the embedding; and attention.
    embedding = llama.vocab_size * llama.hidden_size
    norms = 253 * llama.hidden_size
    matrices = 6 * (llama.parameters - embedding - norms)
    assert model_flops(llama, 1, 1) - matrices == 12 * 126 * 16384


@pytest.mark.verifies(SHARE)
@pytest.mark.parametrize(
    ("gpus", "pp", "teraflops", "printed"),
    [(8192, 16, 430, 43), (16384, 16, 400, 41), (16384, 16, 380, 38)],
)
def test_llama_3s_table_4(gpus, pp, teraflops, printed):
    """Printed 43, 41 and 38%; the second is 40.4% of 989 TF."""
    found = 100 * utilization(teraflops * 1e12, 1.0, 1, 989e12)
    assert found == pytest.approx(printed, abs=0.65)
    assert 8 * 16 * pp * 8 == 16384  # row 3: a data size of 8, not of the 4 printed


@pytest.mark.verifies("xtrain.plan.throughput:layer_forward_flops")
@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_layers_and_head_are_the_whole_model(name):
    shape = ModelShape.preset(name)
    for causal in (False, True):
        layers = range(shape.num_hidden_layers)
        pairs = [layer_forward_flops(shape, 512, layer, causal) for layer in layers]
        head = 2 * shape.vocab_size * shape.hidden_size
        whole = sum(flops for flops, _ in pairs) + head
        assert 3 * whole * 512 == model_flops(shape, 512, 1, causal)
        assert sum(part for _, part in pairs) == attention_flops(shape, 512, causal)


@pytest.mark.verifies(
    "xtrain.plan.throughput:compute_bound_tokens",
    "xtrain.plan.throughput:compute_bound_ranks",
    "xtrain.plan.throughput:compute_bound_mixed",
)
def test_bounds_of_the_scaling_book():
    """TPU v5p: 2550 tokens a chip, F / 2550 tensor ranks."""
    tpu = 4.59e14, 1.8e11
    assert compute_bound_tokens(*tpu) == pytest.approx(2550)
    assert compute_bound_tokens(*tpu, itemsize=4) == pytest.approx(5100)
    assert compute_bound_ranks(30_000, *tpu) == pytest.approx(11.76, abs=5e-3)
    assert compute_bound_ranks(30_000, *tpu, axes=2) == pytest.approx(23.53, abs=5e-3)
    assert compute_bound_mixed(30_000, *tpu) == pytest.approx(432, rel=4e-3)
    assert compute_bound_mixed(13_824, *tpu) == pytest.approx(940, rel=1e-3)
    with pytest.raises(ValueError, match="bandwidth=0"):
        compute_bound_tokens(1.0, 0)
    with pytest.raises(ValueError, match="inner=0"):
        compute_bound_ranks(0, *tpu)


@pytest.mark.verifies(HARDWARE, SHARE, "xtrain.plan.throughput:training_days")
def test_bad_input():
    shape = replace(ModelShape.preset("llama-3-8b"), num_hidden_layers=1)
    with pytest.raises(ValueError, match="recompute='some'"):
        hardware_flops(shape, 8, 1, "some")
    with pytest.raises(ValueError, match="seconds=0"):
        utilization(1.0, 0, 1, 1.0)
    with pytest.raises(ValueError, match="achieved=-1"):
        training_days(1.0, 1.0, 1, -1)
    with pytest.raises(ValueError, match="recompute='selective'"):
        training_days(1.0, 1.0, 1, 1.0, "selective")
