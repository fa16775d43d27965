"""Published training runs as layouts: measured tokens a second beside an estimate.

`docs/data/runs/runs.csv` has a line a run, with its source. What a source does not
print is filled in as a reader of `xtrain plan` would:

    micro-batch        1, or as many micro-batches as the pipeline has ranks
    recomputation      none if that fits into memory, else selective, else as few
                       whole layers as memory asks for
    tensor ranks       cut the sequence, too, unless attention is unfused and everything
                       recomputed (Megatron before Korthikanti et al., 2022)
    expert ranks       of the data ranks if they divide them, else folded

    attention          a kernel older than the device in llm-foundry (2023) and in
                       nanotron's Playbook and torchtitan (FlashAttention 2 on H100)

    gradients          summed in fp32, in llm-foundry and InternEvo in 16 bits

Runs whose conventions are unclear (quality C), that print no layout, or that measure
something broken (the Playbook's sweep but for its fastest quarter) are not judged.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from xtrain.plan.estimate import Assumptions, Estimate, Estimator
from xtrain.plan.hardware import ACCELERATORS
from xtrain.plan.layout import Layout
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.published import GPTShape, LatentShape
from xtrain.plan.shapes import ModelShape
from xtrain.plan.time_constants import FITTED, TimeConstants

OLDER = ("mpt", "upb", "ttn")
GIGABIT = 1e9 / 8
SUMMED_IN_16 = ("mpt", "int")
FASTEST = 0.25
RUNS = Path("docs/data/runs/runs.csv")
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "head_dim": 128}  # fmt: skip
"""DeepSeek-V3's, whose rows print no ranks of its attention."""


class Run(NamedTuple):
    """One measured run."""

    name: str
    source: str
    """Repository, file and commit, or a paper's table."""
    model: str
    kind: str
    """"dense" or "experts"."""
    accelerator: str
    shape: ModelShape
    layout: Layout
    sequence: int
    precision: str
    attention: str
    measured: float
    """Tokens a second of one device."""
    guessed: tuple[str, ...]
    """Fields of the layout that the source does not print."""
    quality: str
    place: float
    """In a sweep of layouts: 0 the fastest, 1 the slowest; 0 elsewhere."""
    network: float | None = None
    """Bytes a second of a device's adapter, where it is not the usual one."""
    tensor_overlap: bool = False

    @property
    def prefix(self) -> str:
        """The collection that it is from."""
        return self.name.split("-")[0]

    def assumptions(self, constants: TimeConstants = FITTED) -> Assumptions:
        """The command's own, with the precision and attention that were printed."""
        return Assumptions(
            precision=self.precision,
            attention=self.attention,
            formula="unfused" if self.attention == "unfused" else "fused",
            sharded_pipeline=True,
            dtypes="zero16" if self.prefix in SUMMED_IN_16 else "megatron-bf16",
            network=self.network,
            tensor_overlap=self.tensor_overlap,
            constants=constants,
        )

    def estimate(self, constants: TimeConstants = FITTED) -> Estimate:
        """Of this run."""
        return Estimator(
            self.shape, self.accelerator, self.sequence, self.assumptions(constants)
        ).estimate(self.layout)

    def ratio(self, constants: TimeConstants = FITTED) -> float:
        """Estimated over measured tokens a second."""
        found = self.estimate(constants).tokens_per_second / self.layout.gpus
        return found / self.measured


class Unread(NamedTuple):
    """A line that cannot be estimated, and why."""

    name: str
    why: str


def read_runs(path: Path = RUNS) -> tuple[list[Run], list[Unread]]:
    """All runs that print a layout, and those that do not or that break a rule."""
    runs, refused = [], []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                runs.append(run_of(row))
            except ValueError as error:
                refused.append(Unread(row["id"], str(error)))
    return runs, refused


def number(row: dict[str, str], name: str, otherwise: int | None = None) -> int:
    """A whole number of a line; ValueError if it is neither there nor given."""
    if row[name]:
        return int(row[name])
    if otherwise is None:
        raise ValueError(f"{name} is not printed")
    return otherwise


def shape_of(row: dict[str, str]) -> ModelShape:
    """Sizes of a line's model."""
    sizes: dict[str, Any] = {
        "vocab_size": number(row, "vocab"),
        "hidden_size": number(row, "hidden"),
        "intermediate_size": number(row, "intermediate"),
        "num_hidden_layers": number(row, "layers"),
        "num_attention_heads": number(row, "heads"),
        "num_key_value_heads": number(row, "kv_heads", number(row, "heads")),
        "head_dim": number(
            row, "head_dim", number(row, "hidden") // number(row, "heads")
        ),
        "tie_word_embeddings": row["tied"] == "1",
    }
    if row["kind"] == "moe":
        sizes |= {
            "num_local_experts": number(row, "experts"),
            "num_experts_per_tok": number(row, "top_k"),
            "moe_intermediate_size": number(row, "moe_intermediate"),
        }
        if "DeepSeek" in row["model"]:
            sizes |= LATENT | {"n_shared_experts": 1, "first_k_dense_replace": 3}
            return LatentShape(**sizes)
    if row["mlp"] == "plain":
        return GPTShape(**sizes, max_position_embeddings=number(row, "sequence"))
    return ModelShape(**sizes)


def kernel_of(row: dict[str, str]) -> str:
    """Of attention."""
    if row["attention"] == "unfused":
        return "unfused"
    return "older flash" if row["id"].split("-")[0] in OLDER else "flash"


def place_of(note: str) -> float:
    """Of "rank 4 of 32 successful configs"."""
    found = re.search(r"rank (\d+) of (\d+) successful", note)
    return int(found[1]) / int(found[2]) if found else 0.0


def run_of(row: dict[str, str]) -> Run:
    """A line as a run; ValueError names what it lacks, or the rule that it breaks."""
    if not row["tokens_per_s_per_gpu"]:
        raise ValueError("no tokens a second are printed")
    if row["accelerator"] not in ACCELERATORS:
        raise ValueError(f"accelerator {row['accelerator']} is not known")
    shape, sequence = shape_of(row), number(row, "sequence")
    tensor, pipeline = number(row, "tensor"), number(row, "pipeline")
    context, gpus = number(row, "context", 1), number(row, "gpus")
    data = gpus // (tensor * pipeline * context)
    batch, guessed = number(row, "global_batch"), []
    size = number(row, "micro_batch", 0)
    if not size:
        guessed.append("micro_batch")
        size = 1
    while batch % (data * size) and size > 1:
        size -= 1
    chunks = number(row, "virtual_stages", 1)
    while chunks > 1 and pipeline * chunks > shape.num_hidden_layers:
        chunks -= 1
    expert = number(row, "expert", 1)
    before_2022 = row["attention"] == "unfused" and row["recompute"] == "full"
    fields: dict[str, Any] = {
        "data": data, "tensor": tensor, "pipeline": pipeline, "context": context,
        "expert": expert, "zero": number(row, "zero_stage", 1) if data > 1 else 0,
        "sequence_parallel": tensor > 1 and not before_2022, "micro_batch": size,
        "micro_batches": max(batch // (data * size), 1),
        "shard_context": True, "replicate": number(row, "replicate", 1),
        "reduce_at_end": row["zero_stage"] == "2" and pipeline > 1,
        "expert_tensor": 1 if tensor > 1 and shape.num_local_experts else None,
    }  # fmt: skip
    interleaved = chunks > 1 and fields["micro_batches"] % pipeline == 0
    if pipeline > 1 and interleaved:
        fields |= {"schedule": "interleaved", "chunks": chunks}
    if row["recompute"] == "unknown":
        guessed.append("recompute")
    precision = row["precision"]
    run = Run(
        row["id"], row["source"], row["model"],
        "experts" if shape.num_local_experts else "dense",
        row["accelerator"], shape, Layout(**fields), sequence, precision,
        kernel_of(row),
        float(row["tokens_per_s_per_gpu"]), tuple(guessed), row["quality"],
        place_of(row["note"]),
        float(row["network_gbits"]) * GIGABIT if row["network_gbits"] else None,
        row["tensor_overlap"] == "1",
    )  # fmt: skip
    run = run._replace(layout=recomputed(run, row["recompute"]))
    broken = [
        one for one in broken_rules(shape, run.layout, sequence, sharded_pipeline=True)
        if one.rule != "vocabulary"  # frameworks pad it themselves
    ]  # fmt: skip
    if broken:
        raise ValueError(f"{broken[0].rule}: {broken[0].why}")
    return run


def recomputed(run: Run, printed: str) -> Layout:
    """The layout with what is recomputed: as printed, or the least that fits."""
    assumed = run.assumptions()._replace(reserve=0.0)
    estimator = Estimator(run.shape, run.accelerator, run.sequence, assumed)
    if printed != "unknown":
        return replace(run.layout, recompute=printed)
    for way in ("none", "selective"):
        layout = replace(run.layout, recompute=way)
        if estimator.room(layout) >= 0:
            return layout
    return estimator.fewest_recomputed(replace(run.layout, recompute="full"))


def judged(runs: Iterable[Run]) -> list[Run]:
    """Those of clear conventions; of the Playbook's sweep the fastest quarter.

    It ran every layout of a model and a number of devices. In the slow ones it meets
    errors of the machine: equal layouts differ by a factor of three, and a neighbour
    with half the ranks by nine.
    """
    return [run for run in runs if run.quality != "C" and run.place <= FASTEST]
