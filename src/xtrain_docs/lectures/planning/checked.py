"""Published throughputs, sizes and days beside what the formulas give."""

from dataclasses import replace
from typing import NamedTuple

from xtrain.plan import (
    GPTShape,
    ModelShape,
    attention_flops,
    hardware_flops,
    model_flops,
    training_days,
    utilization,
)
from xtrain.plan.published import GPT_3

from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, si, value

MODEL, LARGE, SEQUENCE = "llama-3-8b", "llama-3.1-405b", 8192
A100, H100 = 312e12, 989e12


def gpt(h: int, heads: int, layers: int, vocabulary: int = 51200) -> GPTShape:
    """A GPT with an MLP four times as wide, as Megatron's papers have it."""
    return replace(
        GPT_3, vocab_size=vocabulary, hidden_size=h, intermediate_size=4 * h,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=h // heads,
    )  # fmt: skip


class Check(NamedTuple):
    """A published figure, ours, and how far apart they may be."""

    claim: str
    published: float
    ours: float
    error: float
    unit: str = "%"

    @property
    def deviation(self) -> float:
        return self.ours / self.published - 1


def share_of(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Percent of the peak."""
    return 100 * utilization(flops, seconds, gpus, peak)


def checks() -> list[Check]:
    """What papers print, and what the formulas give."""
    return [*_totals(), *_korthikanti(), *_throughputs(), *_playbook(), *_runs()]


def _totals() -> list[Check]:
    llama = ModelShape.preset(LARGE)
    gpt3, days = 6 * GPT_3.parameters * 300e9, 86400.0
    return [
        Check("GPT-3, 300 B tokens", 3.14e23, gpt3, 1.1e-3, "FLOPs"),
        Check("the same", 3640, gpt3 / 1e15 / days, 1.5e-3, "PF-days"),
        Check("Llama 3 405B, 15.6 T tokens", 3.8e25, 6 * llama.parameters * 15.6e12,
              3e-3, "FLOPs"),
        Check("Llama 3 8B", 8_030_261_248, ModelShape.preset(MODEL).parameters, 0.0,
              "parameters"),
        Check("DeepSeek-V3", 671_026_419_200,
              ModelShape.preset("deepseek-v3").parameters, 0.0, "parameters"),
        Check("Mixtral 8x7B, active", 12.9e9,
              ModelShape.preset("mixtral-8x7b").active_parameters, 2e-3, "parameters"),
    ]  # fmt: skip


def _korthikanti() -> list[Check]:
    """Table 5: MFU, and HFU with what it charges for selective recomputation."""
    found = []
    for name, sizes, batch, gpus, seconds, mfu, hfu in (
        ("22B", (6144, 64, 48), 4, 8, 1.10, 41.5, 43.7),
        ("175B", (12288, 96, 96), 64, 64, 13.75, 51.4, 52.8),
        ("530B", (20480, 128, 105), 280, 280, 37.83, 56.0, 57.0),
        ("1T", (25600, 160, 128), 512, 512, 71.49, 56.3, 57.0),
    ):
        step = gpt(*sizes), 2048, batch
        done = hardware_flops(*step, "selective", attention_passes=3)
        for kind, flops, printed in (
            ("MFU", model_flops(*step), mfu),
            ("HFU", done, hfu),
        ):
            ours = share_of(flops, seconds, gpus, A100)
            found.append(
                Check(f"Korthikanti et al., {name}, {kind}", printed, ours, 5e-3)
            )
    return found


def _throughputs() -> list[Check]:
    palm = ModelShape(
        vocab_size=256_000, hidden_size=18432, intermediate_size=73728,
        num_hidden_layers=118, num_attention_heads=48, num_key_value_heads=1,
        head_dim=256,
    )  # fmt: skip
    gopher = gpt(16384, 128, 80, 32000)
    nlg, llama = gpt(20480, 128, 105), ModelShape.preset(MODEL)
    cases = (  # parameters as the paper counts them
        ("PaLM 540B, MFU", 46.2, palm, 540.35e9, 2048, 238.3e3, 6144, 275e12, 7e-4),
        ("MT-NLG 530B, MFU", 30.2, nlg, 530e9, 2048, 65.43e3, 2240, A100, 5e-3),
        ("Gopher 280B, MFU", 32.5, gopher, 280e9, 2048, 0.0152 * 3072 * 2048, 4096,
         123e12, 5e-4),
    )  # fmt: skip
    found = [
        Check(claim, printed, share_of(
            tokens * (6 * parameters + 3 * attention_flops(shape, sequence)),
            1.0, gpus, peak), error)
        for claim, printed, shape, parameters, sequence, tokens, gpus, peak, error
        in cases
    ]  # fmt: skip
    for printed, tokens, words, error in (
        (33, 5762, "torchtitan, Llama 3.1 8B", 0.025),
        (39, 6667, "the same, compiled", 2e-3),
    ):
        flops = tokens * llama.flops_per_token(SEQUENCE)
        found.append(Check(words, printed, share_of(flops, 1.0, 1, H100), error))
    return found


def playbook_shape(layers: int, h: int, inner: int, tied: bool = False) -> ModelShape:
    """A model of the Playbook's benchmarks: heads of 128, and no grouped keys."""
    return ModelShape(
        vocab_size=131_072, hidden_size=h, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=h // 128,
        tie_word_embeddings=tied,
    )  # fmt: skip


def playbook_share(
    layers: int, h: int, inner: int, tokens: float, tied: bool = False
) -> float:
    """Percent, as the Playbook's benchmarks count: all parameters, and all pairs."""
    shape = playbook_shape(layers, h, inner, tied)
    per_token = 6 * shape.parameters + 3 * attention_flops(shape, 4096)
    return share_of(tokens * per_token, 1.0, 1, 989.5e12)


def _playbook() -> list[Check]:
    """The best run of each size; the 80B on 8 nodes contradicts itself."""
    return [
        Check(f"Playbook, {name}, MFU", printed, playbook_share(*sizes, tokens), error)
        for name, printed, sizes, tokens, error in (
            ("1.34B, 1 node", 44.324, (16, 2048, 8192), 38_894.51, 1.5e-3),
            ("3.57B, 1 node", 46.684, (28, 3072, 8192), 16_426.09, 1.5e-3),
            ("8.86B, 1 node", 45.219, (32, 4096, 14336), 7_503.28, 1.5e-3),
            ("80B, 16 nodes", 34.293, (80, 8192, 28672), 662.14, 1.5e-3),
            ("80B, 8 nodes (**its own data disagree**)", 30.648, (80, 8192, 28672),
             664.99, 0.13),
        )
    ]  # fmt: skip


def _runs() -> list[Check]:
    step = 1024 * 3584
    return [
        Check("GPT-3, 1024 A100", 34, training_days(175e9, 300e9, 1024, 140e12), 4e-3,
              "days"),
        Check("1T, 3072 A100", 84, training_days(1008e9, 450e9, 3072, 163e12), 2e-3,
              "days"),
        Check("IDEFICS-80B, compute of a step", 18,
              training_days(80e9, step, 512, 250e12) * 86400, 0.02, "s"),
        Check("Megatron, 1008B, table 1 (HFU)", 52, share_of(163e12, 1.0, 1, A100),
              0.011),
        *(Check(f"Llama 3 405B, {rate} TF", printed,
                share_of(rate * 1e12, 1.0, 1, H100), 0.017)
          for rate, printed in ((430, 43), (400, 41), (380, 38))),
    ]  # fmt: skip


@TABLES
def compute_checks() -> Table:
    """Published claims, our values, and the deviation."""
    rows = []
    for check in checks():
        exact = check.error == 0
        apart = "0" if exact else f"{100 * check.deviation:+.2f} %"
        rows.append([check.claim, _shown(check, check.published),
                     _shown(check, check.ours), apart])  # fmt: skip
    return Table(["claim", "printed", "ours", "deviation"], rows, "lrrr")


def _shown(check: Check, amount: float) -> str:
    if check.unit == "%":
        return f"{amount:.4g} %"
    if check.unit == "FLOPs":
        mantissa, exponent = f"{amount:.3e}".split("e+")
        return rf"${mantissa} \cdot 10^{{{exponent}}}$"
    if check.error == 0:
        return number(amount)
    if check.unit == "parameters":
        return si(amount, "", 4)
    return f"{number(amount, 4)} {check.unit}"


@value
def compute_true_mfu(h: int, heads: int, layers: int, batch: int, rate: float) -> float:
    """MFU of a run of which `rate` FLOP/s a device are printed with recomputation."""
    step = gpt(h, heads, layers), 2048, batch
    done = hardware_flops(*step, "full")
    return utilization(model_flops(*step), done / rate, 1, A100)


@value
def compute_tied_table(tied: bool) -> float:
    """Percent of a 1.34B run of the Playbook without a pipeline."""
    return playbook_share(16, 2048, 8192, 40_149.94, tied)


@value
def compute_playbook_80b() -> float:
    """Share of the peak by the tokens a second of its 80B run on 8 nodes."""
    return playbook_share(80, 8192, 28672, 664.99) / 100
