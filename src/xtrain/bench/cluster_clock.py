"""How right a virtual cluster's clock is: programs on 4 real ranks and on virtual ones.

    python -m xtrain.bench.cluster_clock -o FILE

Four programs calibrate the virtual network: ring all-reduces of all ranks, and of two
while the others wait, of a small and of a large tensor. Their times give two pairs of a
latency and a bandwidth for `flat`: what a step costs with its code, its wake-ups, its
copy and its sum when 4 ranks share the cores, and when 2 do. Then the other programs
run on both, with the same code: the tree on the second network, all others on the
first.

Real ranks take turns on the cores with whatever else runs there. Every program runs
many times, in turn with the others, and the fastest tenth is averaged. All of this is
done several times, and the run with the least calibrated latency is kept: the machine
had least else to do.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.bench.machine import describe, versions
from xtrain.cluster import VirtualCluster, advance, flat, now, running
from xtrain.comm import (
    halving_doubling_all_reduce,
    irecv,
    isend,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import gpipe, one_f_one_b
from xtrain.testing import World

RANKS = 4
STEPS = 2 * (RANKS - 1)
CALLS = 5  # in a row, of the short programs
SMALL, LARGE = 1 << 10, 1 << 17  # bytes of a message, of the calibration
FORWARD, BACKWARD = 20e-3, 40e-3  # seconds of a stage
Call = Callable[[], object]


def compute(seconds: float) -> None:
    """Takes time on no core: real ranks sleep."""
    if running.cluster() is None:
        time.sleep(seconds)
    else:
        advance(seconds)


def clock() -> float:
    return time.perf_counter() if running.cluster() is None else now()


def all_reduce(function: Callable[[Tensor], None], nbytes: int) -> Call:
    tensor = torch.zeros(nbytes // 4)
    return lambda: function(tensor)


def all_gather(nbytes: int) -> Call:
    piece, whole = torch.zeros(nbytes // 4 // RANKS), torch.zeros(nbytes // 4)
    return lambda: ring_all_gather(whole, piece)


def reduce_scatter(nbytes: int) -> Call:
    piece, whole = torch.zeros(nbytes // 4 // RANKS), torch.zeros(nbytes // 4)
    return lambda: ring_reduce_scatter(piece, whole)


def overlapped(nbytes: int, seconds: float) -> Call:
    """To the right neighbour, from the left one, while each rank computes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(2, nbytes, dtype=torch.uint8).unbind()

    def call() -> None:
        works = [
            isend(sent, (rank + 1) % size),
            irecv(received, (rank - 1) % size),
        ]
        compute(seconds)
        for work in works:
            work.wait()

    return call


def of_two(nbytes: int) -> Call | None:
    """Ring all-reduces of ranks 0 and 1, two messages in a row each, three times."""
    pair = dist.new_group([0, 1])
    tensor = torch.zeros(2 * nbytes // 4)

    def call() -> None:
        for _ in range(STEPS // 2):
            ring_all_reduce(tensor, group=pair)

    return call if dist.get_rank() < 2 else None


class Takes(torch.autograd.Function):
    """Time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        compute(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        compute(BACKWARD)
        return grad.clone()


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(x * self.scale)


def square(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), len(target)


def pipeline(make: Callable[[int, int], Any], batches: int) -> Call:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Stage(), rank, size)
    runner = PipelineRunner(stage, make(size, batches), square)
    inputs = torch.ones(batches, 64)
    return lambda: runner.step(inputs, inputs)


CALIBRATION: dict[str, Callable[[], Call | None]] = {
    "small of all": lambda: all_reduce(ring_all_reduce, RANKS * SMALL),
    "large of all": lambda: all_reduce(ring_all_reduce, RANKS * LARGE),
    "small of two": lambda: of_two(SMALL),
    "large of two": lambda: of_two(LARGE),
}
OF_TWO = "tree all-reduce, 64 KiB"  # most of its ranks wait at any time
PROGRAMS: dict[str, tuple[Callable[[], Call], int]] = {  # every how many rounds
    "ring all-reduce, 128 KiB": (lambda: all_reduce(ring_all_reduce, 1 << 17), 1),
    "ring all-reduce, 256 KiB": (lambda: all_reduce(ring_all_reduce, 1 << 18), 1),
    "ring reduce-scatter, 256 KiB": (lambda: reduce_scatter(1 << 18), 1),
    "ring all-gather, 256 KiB": (lambda: all_gather(1 << 18), 1),
    "halving-doubling, 128 KiB": (
        lambda: all_reduce(halving_doubling_all_reduce, 1 << 17), 1,
    ),
    OF_TWO: (lambda: all_reduce(tree_all_reduce, 1 << 16), 1),
    "a message under 20 ms of compute": (lambda: overlapped(1 << 18, 20e-3), 10),
    "1F1B, 8 micro-batches": (lambda: pipeline(one_f_one_b, 8), 30),
    "GPipe, 8 micro-batches": (lambda: pipeline(gpipe, 8), 30),
}  # fmt: skip


def seconds_of(call: Call | None, times: int) -> float:
    """Of each of so many calls in a row; None where a rank waits.

    From where the last rank begins to where the last one ends: ranks leave a barrier
    at different times, and one call alone would profit from what others did before.
    """
    dist.barrier()
    ends = torch.zeros(2, dtype=torch.float64)
    if call is not None:
        ends[0] = clock()
        for _ in range(times):
            call()
        ends[1] = clock()
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return float(ends[1] - ends[0]) / times


def all_calls() -> dict[str, tuple[Call | None, int]]:
    """Of each program, and in every how many rounds it runs."""
    calls = {name: (make(), 1) for name, make in CALIBRATION.items()}
    return calls | {name: (make(), every) for name, (make, every) in PROGRAMS.items()}


def measured(rounds: int) -> dict[str, list[float]]:
    """Seconds of each program, round after round."""
    calls = all_calls()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-1, rounds):
        for name, (call, every) in calls.items():
            if number % every == 0 or number < 0:
                seconds = seconds_of(call, CALLS if every == 1 else 1)
                if number >= 0:
                    found[name].append(seconds)
    return found


def virtual() -> dict[str, float]:
    """Virtual seconds of each program, its second run."""
    return {name: times[0] for name, times in measured(1).items()}


def quiet(samples: list[float]) -> float:
    """The mean of the fastest tenth."""
    kept = sorted(samples)[: max(1, len(samples) // 10)]
    return sum(kept) / len(kept)


def calibrated(real: dict[str, float], which: str) -> tuple[float, float]:
    """Latency and bandwidth of one of six messages in a row: a line through two."""
    small, large = (real[f"{size} {which}"] / STEPS for size in ("small", "large"))
    beta = (large - small) / (LARGE - SMALL)
    return small - SMALL * beta, 1 / beta


def quietest(backend: str, rounds: int, runs: int) -> dict[str, Any]:
    """The run in which other programs disturbed the calibration least."""
    results = [compare(backend, rounds) for _ in range(runs)]
    return min(results, key=lambda result: result["networks"]["of all"][0])


def compare(backend: str, rounds: int) -> dict[str, Any]:
    """All programs on real ranks over a backend, and on virtual ones."""
    with World(RANKS, backend=backend) as world:
        samples = world.run(measured, rounds, timeout=600)[0]
    real = {name: quiet(times) for name, times in samples.items()}
    networks = {which: calibrated(real, which) for which in ("of all", "of two")}
    found = {
        which: VirtualCluster(RANKS, flat(*network)).run(virtual)[0]
        for which, network in networks.items()
    }
    rows = []
    for name in PROGRAMS:
        which = "of two" if name == OF_TWO else "of all"
        rows.append(
            {
                "program": name, "network": which, "real_seconds": real[name],
                "virtual_seconds": found[which][name], "samples": len(samples[name]),
            }
        )  # fmt: skip
    return {"backend": backend, "networks": networks, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backends", nargs="+", default=["xtrain-shm", "gloo"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args(arguments)
    results = []
    for backend in chosen.backends:
        result = quietest(backend, chosen.rounds, chosen.runs)
        results.append(result)
        for which, (latency, bandwidth) in result["networks"].items():
            numbers = f"{latency * 1e6:.1f} us, {bandwidth / 1e9:.2f} GB/s"
            print(f"{backend} {which}: {numbers}", flush=True)
        for row in result["rows"]:
            real, ours = row["real_seconds"], row["virtual_seconds"]
            name = row["program"]
            print(f"  {name:35} {real * 1e3:9.3f} {ours * 1e3:9.3f} ms "
                  f"{ours / real - 1:+7.1%}", flush=True)  # fmt: skip
    if chosen.output:
        record = {"machine": describe(), "versions": versions(), "results": results}
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
