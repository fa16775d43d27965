"""All-reduce algorithms on a virtual cluster: how long each takes in virtual time.

    python -m xtrain.bench.cluster_all_reduce -o docs/data/cluster/all_reduce.json

Tensors above 64 KiB are on the meta device, so that 1,024 ranks of 1 GiB fit. A row
that the file has already is not run again. Virtual seconds are the same on every
machine.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from xtrain.cluster import VirtualCluster, now
from xtrain.cluster.topology_text import topology_of
from xtrain.comm import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)

Row = dict[str, Any]
FLAT, NODES = "flat(5e-6, 50e9)", "dgx_h100"
KIB, MIB, GIB = 2**10, 2**20, 2**30
SMALL = 64 * KIB
EVERY = tuple(4 * KIB * 8**step for step in range(8))  # 4 KiB to 8 GiB
FEW = (4 * KIB, 32 * MIB, GIB)
# algorithm, topology, ranks, sizes; the last ones take minutes
ROWS: list[tuple[str, str, int, tuple[int, ...]]] = [
    *(
        (name, topology, ranks, EVERY)
        for ranks in (64, 1024)
        for topology in (FLAT, NODES)
        for name in ("tree", "halving_doubling")
    ),
    ("hierarchical", NODES, 64, EVERY),
    ("ring", FLAT, 64, EVERY),
    ("ring", NODES, 64, EVERY),
    ("hierarchical", NODES, 1024, FEW),
    ("ring", FLAT, 1024, FEW[:1]),
    ("ring", NODES, 1024, FEW[:1]),
    ("ring", NODES, 1024, FEW[2:]),
    ("ring", FLAT, 1024, FEW[1:2]),
]


def hierarchical(tensor: Tensor) -> None:
    """Inside the nodes of 8 ranks, and between them."""
    nodes = dist.get_world_size() // 8
    mesh = init_device_mesh("cpu", (nodes, 8), mesh_dim_names=("between", "inside"))
    inside, between = mesh["inside"].get_group(), mesh["between"].get_group()
    hierarchical_all_reduce(tensor, intra_group=inside, inter_group=between)


ALGORITHMS: dict[str, Callable[[Tensor], Any]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical,
}


def all_reduce(algorithm: str, nbytes: int) -> float:
    """On each rank: the virtual seconds of one all-reduce of fp32."""
    device = "cpu" if nbytes <= SMALL else "meta"
    tensor = torch.zeros(nbytes // 4, device=device)
    ALGORITHMS[algorithm](tensor)
    return now()


def measure(algorithm: str, topology: str, ranks: int, nbytes: int) -> Row:
    """One all-reduce among all ranks of a cluster."""
    cluster = VirtualCluster(ranks, topology_of(topology, ranks), checks=False)
    begun = time.process_time()
    seconds = max(cluster.run(all_reduce, algorithm, nbytes))
    return {
        "algorithm": algorithm, "topology": topology, "ranks": ranks, "bytes": nbytes,
        "seconds": seconds, "processor_seconds": round(time.process_time() - begun, 2),
    }  # fmt: skip


def key(row: Row) -> tuple:
    return row["algorithm"], row["topology"], row["ranks"], row["bytes"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args(arguments).output
    rows = json.loads(output.read_text()) if output.is_file() else []
    output.parent.mkdir(parents=True, exist_ok=True)
    for algorithm, topology, ranks, sizes in ROWS:
        for nbytes in sizes:
            if (algorithm, topology, ranks, nbytes) in map(key, rows):
                continue
            rows.append(measure(algorithm, topology, ranks, nbytes))
            gc.collect()  # a ring leaves millions of objects
            print(*rows[-1].values(), flush=True)
            lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
            output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
