"""A step of FSDP on a virtual cluster of H100 nodes: what each rank does, and when.

    python -m xtrain.bench.cluster_fsdp -o docs/data/cluster/fsdp.json

The decoder is on the meta device: shapes without data, so 256 ranks fit. Operators take
the time of their FLOPs and bytes on an H100. A row that the file has already is not run
again. Virtual seconds are the same on every machine.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import FullyShardedDataParallel

Row = dict[str, Any]
SIZES = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 8, "num_attention_heads": 32,
}  # fmt: skip
LENGTH = 4096  # tokens of a sequence
ROWS = [(8, 1), (256, 1), (256, 2)]  # (ranks, sequences of each)


def steps(sequences: int, layers: int) -> tuple[float, float]:
    """On each rank: begin and end of the second step, which knows the units' order."""
    config = XtrainConfig(**SIZES | {"num_hidden_layers": layers})
    model = FullyShardedDataParallel(
        XtrainModel(config, device="meta"),
        compute_dtype=torch.bfloat16,
        device="meta",
    )
    tokens = torch.zeros(sequences, LENGTH, dtype=torch.int64, device="meta")
    for _ in range(2):
        dist.barrier()
        begun = now()
        model(tokens, labels=tokens).backward()
    return begun, now()


def measure(ranks: int, sequences: int, layers: int = 8) -> Row:
    """Two steps on all ranks; what rank 0 did in the second."""
    cluster = VirtualCluster(
        ranks, dgx_h100(ranks // 8), accelerator="h100", checks=False, record=True
    )
    processor = time.process_time()
    begun, ended = cluster.run(steps, sequences, layers)[0]
    record = cluster.record
    assert record is not None
    waits = [w for w in record.waits[0] if begun <= w.start and w.end <= ended]
    flights = [
        (t.kind, t.nbytes, t.start - begun, t.end - begun)
        for t in record.transfers
        if 0 in t.ranks and begun <= t.start and t.end <= ended
    ]
    return {
        "ranks": ranks, "sequences": sequences, "seconds": ended - begun,
        "waits": [(w.start - begun, w.end - begun, w.call) for w in waits],
        "flights": flights,
        "peak": [d.peak for d in cluster.devices[:1] if d is not None][0],
        "flops": [d.flops for d in cluster.devices[:1] if d is not None][0],
        "processor_seconds": round(time.process_time() - processor, 2),
    }  # fmt: skip


if __name__ == "__main__":
    import sys
    row = measure(*map(int, sys.argv[1:]))
    print(json.dumps({k: v for k, v in row.items() if k not in ("waits", "flights")}))
    for f in row["waits"]: print(f"{f[0]*1e3:8.3f} {f[1]*1e3:8.3f} {f[2]}")
    for f in row["flights"]: print(f"{f[2]*1e3:8.3f} {f[3]*1e3:8.3f} {f[0]} {f[1]/1e6:.1f}")
