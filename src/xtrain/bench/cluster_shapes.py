"""Large models on a virtual cluster, by their shapes alone: bytes, times, memory.

    python -m xtrain.bench.cluster_shapes -o docs/data/cluster/shapes.json

Each program runs in a process of its own. One rank of each class runs where `alike`
is given. Virtual seconds and bytes are the same on every machine.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from xtrain.bench.machine import describe, versions
from xtrain.cluster import VirtualCluster, dgx_h100
from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel, batch_group
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import one_f_one_b
from xtrain.train.dry_run_shapes import flash
from xtrain.zero import FullyShardedDataParallel

SEQUENCE = 4096
OPTIONS: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
LLAMA_70B = XtrainConfig(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256,
)  # fmt: skip
MIXTRAL_8X7B = XtrainConfig(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32_000,
    num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=14_336,
)  # fmt: skip


class Program(NamedTuple):
    """A step of a model on so many ranks of each axis."""

    config: XtrainConfig
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    micro_batches: int = 1
    symmetry: bool = True
    """One rank of each class runs."""

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.expert

    @property
    def alike(self) -> Callable[[int], int] | None:
        inner = self.size // self.pipeline
        return (lambda rank: rank - rank % inner) if self.symmetry else None


PROGRAMS = {
    "sharded": Program(LLAMA_70B, data=8, tensor=8),
    "sharded, all ranks run": Program(LLAMA_70B, data=8, tensor=8, symmetry=False),
    "pipeline": Program(LLAMA_70B, tensor=4, pipeline=16, micro_batches=32),
    "pipeline with experts": Program(
        MIXTRAL_8X7B, pipeline=16, expert=4, micro_batches=16, symmetry=False
    ),
}


def sharded(program: Program) -> None:
    """FSDP over data ranks of a model cut over tensor ranks."""
    mesh = init_mesh((program.data, program.tensor), ("data", "tensor"))
    model = XtrainModel(
        program.config, mesh, attention=flash, sequence_parallel=True, **OPTIONS
    )
    wrapped = FullyShardedDataParallel(
        model, blocks=[DecoderLayer], device="meta",
        process_group=mesh["data"].get_group(),
    )  # fmt: skip
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    wrapped(tokens, tokens).backward()
    model.sync_gradients()


def pipeline(program: Program) -> None:
    """1F1B over stages that are cut over tensor ranks, or whose experts are."""
    axes = {"pipeline": program.pipeline, "tensor": program.tensor}
    if program.expert > 1:
        axes = {
            "pipeline": program.pipeline,
            "expert_data": 1,
            "expert": program.expert,
        }
    mesh = init_mesh(tuple(axes.values()), tuple(axes))
    schedule = one_f_one_b(program.pipeline, program.micro_batches)
    stages = XtrainModel.stages(
        program.config, mesh, schedule, attention=flash,
        sequence_parallel="tensor" in axes, **OPTIONS,
    )  # fmt: skip
    group, last = mesh["pipeline"].get_group(), cast(Any, stages[-1].module)
    over = batch_group(mesh) if program.expert > 1 else None
    runner = PipelineRunner(stages, schedule, last.loss_fn, group, data_group=over)
    shape = program.micro_batches, SEQUENCE
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    runner.step(tokens, tokens)


def measure(name: str) -> dict[str, Any]:
    """One program in this process."""
    program = PROGRAMS[name]
    cluster = VirtualCluster(
        program.size, dgx_h100(program.size // 8), accelerator="h100", record=True,
        checks=False, alike=program.alike,
    )  # fmt: skip
    begun = time.process_time()
    cluster.run(sharded if program.pipeline == 1 else pipeline, program)
    spent = time.process_time() - begun
    assert cluster.record is not None
    peaks = [device.peak for device in cluster.devices if device is not None]
    return {
        "program": name, "ranks": program.size,
        "layers": program.config.num_hidden_layers,
        "running": len(set(cluster.stand_ins)),
        "processor_seconds": round(spent, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "virtual_seconds": max(cluster.seconds),
        "most_memory": max(peaks), "least_memory": min(peaks),
        "sent": sent(cluster),
    }  # fmt: skip


def sent(cluster: VirtualCluster) -> dict[str, int]:
    """Bytes of rank 0 in a step by what it called and with how many ranks.

    Of a collective the bytes of its whole tensor; agreements are left out.
    """
    found: dict[str, int] = {}
    assert cluster.record is not None
    for one in cluster.record.transfers:
        among = one.ranks[0] == 0 if one.kind == "message" else 0 in one.ranks
        if among and len(one.ranks) > 1 and one.nbytes > 4096:
            key = f"{one.kind} {len(one.ranks)}"
            found[key] = found.get(key, 0) + one.nbytes
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.only:
        print(json.dumps(measure(chosen.only)))
        return
    rows = []
    for name in PROGRAMS:
        command = [sys.executable, "-m", __spec__.name, "--only", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    if chosen.output:
        record = {"machine": describe(), "versions": versions(), "rows": rows}
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
