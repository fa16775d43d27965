"""How a virtual cluster grows with its ranks: processor seconds and memory of programs.

    python -m xtrain.bench.cluster_scale --ranks 64 256 1024 -o FILE

Every program runs in a process of its own, so that its peak memory is its own. Seconds
are those of the processor, of all threads, without the start of the cluster.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from xtrain.bench.machine import describe, versions
from xtrain.cluster import VirtualCluster, flat
from xtrain.comm.ring import ring_all_reduce
from xtrain.comm.tree import tree_all_reduce
from xtrain.expert_parallel import GShardMoE
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import one_f_one_b
from xtrain.zero import FullyShardedDataParallel

FLOATS = 1024
LATENCY, BANDWIDTH = 5e-6, 50e9
Parts = list[tuple[str, float]]


class Clock:
    """Processor seconds of the parts of a program, by its rank 0."""

    def __init__(self) -> None:
        self.parts: Parts = []
        dist.barrier()
        self._begun = time.process_time()

    def end(self, part: str) -> None:
        """All ranks have come to the end of a part."""
        dist.barrier()
        now = time.process_time()
        self.parts.append((part, now - self._begun))
        self._begun = now


def torch_all_reduce() -> Parts:
    tensor, clock = torch.ones(FLOATS), Clock()
    dist.all_reduce(tensor)
    clock.end("torch all_reduce")
    return clock.parts


def tree() -> Parts:
    tensor, clock = torch.ones(FLOATS), Clock()
    tree_all_reduce(tensor)
    clock.end("tree all-reduce")
    return clock.parts


def ring() -> Parts:
    tensor, clock = torch.ones(FLOATS), Clock()
    ring_all_reduce(tensor)
    clock.end("ring all-reduce")
    return clock.parts


def fsdp() -> Parts:
    clock = Clock()
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.ModuleList(layers)[0], *layers[1:], nn.Linear(64, 8))
    sharded = FullyShardedDataParallel(model, blocks=[nn.Sequential])
    clock.end("FSDP, construction")
    sharded(torch.ones(2, 64)).sum().backward()
    clock.end("FSDP, a step")
    return clock.parts


def pipeline() -> Parts:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8), rank, size)
    batches = 4 * size
    clock = Clock()
    runner = PipelineRunner(stage, one_f_one_b(size, batches), sum_of_squares)
    clock.end("1F1B, 4 micro-batches a stage, construction")
    runner.step(torch.ones(batches, 8), torch.ones(batches, 8))
    clock.end("1F1B, 4 micro-batches a stage, a step")
    return clock.parts


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> Any:
    return (output - target).square().sum(), len(target)


def experts() -> Parts:
    size, clock = dist.get_world_size(), Clock()
    moe = GShardMoE(16, 32, size, 2)
    clock.end("experts, construction")
    moe(torch.randn(1, 16, 16)).sum().backward()
    clock.end("experts, forward and backward")
    return clock.parts


def all_to_all() -> Parts:
    size = dist.get_world_size()
    given, taken = torch.ones(size * 16), torch.empty(size * 16)
    clock = Clock()
    dist.all_to_all_single(taken, given)
    clock.end("torch all_to_all_single")
    return clock.parts


def mesh() -> Parts:
    clock = Clock()
    init_device_mesh("cpu", (dist.get_world_size() // 8, 8), mesh_dim_names=("a", "b"))
    clock.end("DeviceMesh (ranks / 8, 8)")
    return clock.parts


PROGRAMS: dict[str, tuple[Callable[[], Parts], int]] = {  # and the most ranks
    "start": (lambda: Clock().parts, 1024),
    "torch": (torch_all_reduce, 1024),
    "tree": (tree, 1024),
    "ring": (ring, 1024),
    "fsdp": (fsdp, 1024),
    "pipeline": (pipeline, 64),
    "all_to_all": (all_to_all, 1024),
    "experts": (experts, 256),
    "mesh": (mesh, 1024),
}


def measure(name: str, ranks: int) -> list[dict[str, Any]]:
    """One program in this process."""
    cluster = VirtualCluster(ranks, flat(LATENCY, BANDWIDTH), checks=False)
    begun = time.process_time()
    parts = cluster.run(PROGRAMS[name][0])[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = ("start, run and end", time.process_time() - begun)
    if name == "start":
        parts = [whole]
    return [
        {
            "program": part, "ranks": ranks, "processor_seconds": round(seconds, 4),
            "peak_bytes": peak, "virtual_seconds": max(cluster.seconds),
        }
        for part, seconds in parts
    ]  # fmt: skip


def measure_apart(name: str, ranks: int) -> list[dict[str, Any]]:
    """One program in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--only", name, str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['program']:45} {row['ranks']:6,} {row['processor_seconds']:9.3f} s "
        f"{row['peak_bytes'] / 1e9:6.2f} GB"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.only:
        print(json.dumps(measure(chosen.only[0], int(chosen.only[1]))))
        return
    rows = []
    for name in chosen.programs:
        for ranks in chosen.ranks:
            if ranks <= PROGRAMS[name][1]:
                found = measure_apart(name, ranks)
                print(*map(line, found), sep="\n", flush=True)
                rows += found
    if chosen.output:
        record = {"machine": describe(), "versions": versions(), "rows": rows}
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
