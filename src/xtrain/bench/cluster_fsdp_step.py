"""A step of FSDP on a virtual cluster: when a rank computes, and when it waits.

    python -m xtrain.bench.cluster_fsdp_step -o docs/data/cluster/fsdp_step.json

The model is on the meta device: shapes, bytes and virtual times are real, and nothing
is computed. Virtual seconds are the same on every machine.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.zero import FullyShardedDataParallel

LAYERS, WIDTH = 4, 8192
CASES = [(8, 4096), (64, 4096), (256, 4096), (256, 1024), (256, 2048), (256, 8192)]
"""Ranks, and tokens of each."""


class FeedForward(nn.Sequential):
    """The feed-forward part of a layer: one unit."""

    def __init__(self, width: int):
        super().__init__(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(),
            nn.Linear(4 * width, width, bias=False),
        )  # fmt: skip


def step(layers: int, width: int, tokens: int) -> tuple[float, float, float]:
    """On each rank: the clock before the second step, before its backward, after it.

    In the first one the wrapper does not know yet which unit follows which.
    """
    with torch.device("meta"):
        blocks = [FeedForward(width).to(torch.bfloat16) for _ in range(layers)]
        x_TD = torch.empty(tokens, width, dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        nn.Sequential(*blocks), blocks=[FeedForward], device="meta"
    )
    model(x_TD).sum().backward()
    dist.barrier()
    begun = now()
    loss = model(x_TD).sum()
    middle = now()
    loss.backward()
    return begun, middle, now()


def measure(ranks: int, tokens: int) -> dict[str, Any]:
    """One step, the pieces of rank 0's time, and the collectives that it was in."""
    cluster = VirtualCluster(
        ranks, dgx_h100(max(1, ranks // 8)), accelerator="h100", record=True,
        checks=False,
    )  # fmt: skip
    spent = time.process_time()
    begun, middle, end = cluster.run(step, LAYERS, WIDTH, tokens)[0]
    record = cluster.record
    assert record is not None
    waits = [span for span in record.waits[0] if span.start >= begun]
    sent = [one for one in record.transfers if one.start >= begun]
    return {
        "ranks": ranks, "tokens": tokens, "layers": LAYERS, "width": WIDTH,
        "forward": middle - begun, "step": end - begun,
        "processor_seconds": round(time.process_time() - spent, 1),
        "waits": [(span.start - begun, span.end - begun) for span in waits],
        "collectives": [
            (one.kind, one.nbytes, one.start - begun, one.end - begun) for one in sent
        ],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args(arguments).output
    output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for ranks, tokens in CASES:
        rows.append(measure(ranks, tokens))
        print(ranks, tokens, rows[-1]["step"], rows[-1]["processor_seconds"])
        lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
        output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
