"""A step of FSDP on a virtual cluster of H100 nodes: what a rank does, and when.

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
from torch import Tensor

from xtrain.cluster import VirtualCluster, dgx_h100, now
from xtrain.cluster.topology import NODE
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import FullyShardedDataParallel

Row = dict[str, Any]
LAYERS = 4
CONFIG = XtrainConfig(  # the layers of Llama 2 7B
    vocab_size=32000, hidden_size=4096, intermediate_size=11008,
    num_hidden_layers=LAYERS, num_attention_heads=32,
)  # fmt: skip
ROWS = [(8, 2048, True), (256, 2048, True), (256, 4096, True)]
# ranks, tokens of each, reshard_after_forward


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **_: Any) -> Tensor:
    """FlashAttention: on the meta device torch would take its unfused form."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, 0.0, is_causal)[0]


def two_steps(tokens: int, reshard: bool) -> tuple[float, float]:
    """On each rank: begin and end of the second step; the first finds the order."""
    model = FullyShardedDataParallel(
        XtrainModel(CONFIG, attention=flash, device="meta"),
        compute_dtype=torch.bfloat16,
        reshard_after_forward=reshard,
        device="meta",
    )
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    for _ in range(2):
        dist.barrier()
        begun = now()
        model(ids, labels=ids).backward()
    return begun, now()


def measure(ranks: int, tokens: int, reshard: bool) -> Row:
    """Two steps on all ranks; what rank 0 did in the second."""
    cluster = VirtualCluster(
        ranks, dgx_h100(ranks // NODE), accelerator="h100", checks=False, record=True
    )
    processor = time.process_time()
    found = cluster.run(two_steps, tokens, reshard)
    processor = time.process_time() - processor
    assert len(set(found)) == 1, "all ranks do the same at the same time"
    begun, ended = found[0]
    record, device = cluster.record, cluster.devices[0]
    assert record is not None and device is not None
    return {
        "ranks": ranks, "tokens": tokens, "reshard": reshard,
        "seconds": ended - begun,
        "waits": [
            (w.start - begun, w.end - begun, w.call.partition("(")[0])
            for w in record.waits[0]
            if begun <= w.start < ended
        ],
        "flights": [
            (t.kind, t.nbytes, t.start - begun, t.end - begun)
            for t in record.transfers
            if 0 in t.ranks and t.nbytes and begun <= t.start < ended
        ],
        "flops": device.flops, "peak": device.peak,
        "processor_seconds": round(processor, 1),
    }  # fmt: skip


def key(row: Row) -> tuple:
    return row["ranks"], row["tokens"], row["reshard"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args(arguments).output
    rows = json.loads(output.read_text()) if output.is_file() else []
    output.parent.mkdir(parents=True, exist_ok=True)
    for asked in ROWS:
        if asked not in map(key, rows):
            rows.append(measure(*asked))
            print(*asked, rows[-1]["seconds"], flush=True)
            lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
            output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
