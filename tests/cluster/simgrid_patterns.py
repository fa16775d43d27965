"""Twelve patterns of messages, as steps of each rank, and how both clocks run them.

A step is a number of seconds to compute, or (messages to send, messages to receive),
each as [peer, bytes], all at once.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtrain.cluster import (
    Topology,
    VirtualCluster,
    advance,
    dgx_h100,
    fat_tree,
    nvlink,
    table,
    tpu_torus,
)

SCRIPT = Path(__file__).with_name("simgrid_times.py")
PYTHON = "/usr/bin/python3"  # the one that Debian's package is for
MEGABYTE = 10**6
Steps = list[Any]
Message = tuple[int, int, int]  # source, target, bytes


def rounds(size: int, messages: Sequence[Sequence[Message]]) -> list[Steps]:
    """Messages of each round all at once; a rank begins the next when it is through."""
    ranks: list[Steps] = [[] for _ in range(size)]
    for each in messages:
        for rank, steps in enumerate(ranks):
            sent = [[target, n] for source, target, n in each if source == rank]
            received = [[source, n] for source, target, n in each if target == rank]
            if sent or received:
                steps.append((sent, received))
    return ranks


def ring(size: int, nbytes: int) -> list[Steps]:
    step = [(rank, (rank + 1) % size, nbytes // size) for rank in range(size)]
    return rounds(size, [step] * (2 * (size - 1)))


def tree(size: int, nbytes: int) -> list[Steps]:
    up, reach = [], 1
    while reach < size:
        up.append(
            [(rank, rank - reach, nbytes) for rank in range(reach, size, 2 * reach)]
        )
        reach *= 2
    down = [[(target, source, n) for source, target, n in each] for each in up[::-1]]
    return rounds(size, up + down)


def halving_doubling(size: int, nbytes: int) -> list[Steps]:
    halve, distance = [], size // 2
    while distance:
        nbytes //= 2
        halve.append([(rank, rank ^ distance, nbytes) for rank in range(size)])
        distance //= 2
    return rounds(size, halve + halve[::-1])


def all_to_all(size: int, nbytes: int) -> list[Steps]:
    every = [(s, t, nbytes // size) for s in range(size) for t in range(size) if s != t]
    return rounds(size, [every])


def uneven_all_to_all(size: int, nbytes: int) -> list[Steps]:
    """As of experts: most tokens go to few of them."""
    every = [
        (s, t, nbytes // (1 + t)) for s in range(size) for t in range(size) if s != t
    ]
    return rounds(size, [every])


def incast(size: int, nbytes: int) -> list[Steps]:
    """All to rank 0, more from the higher ones, which begin later."""
    ranks = rounds(size, [[(r, 0, nbytes * r // size) for r in range(1, size)]])
    return [[1e-6 * rank, *steps] for rank, steps in enumerate(ranks)]


def outcast(size: int, nbytes: int) -> list[Steps]:
    return rounds(size, [[(0, r, nbytes * (1 + r % 3)) for r in range(1, size)]])


def shift(size: int, nbytes: int) -> list[Steps]:
    """To the rank 3 places on, from ranks that begin at different times."""
    ranks = rounds(size, [[(r, (r + 3) % size, nbytes) for r in range(size)]])
    return [[2e-6 * (rank % 4), *steps] for rank, steps in enumerate(ranks)]


def permutation(size: int, nbytes: int) -> list[Steps]:
    targets = list(range(size))
    random.Random(3).shuffle(targets)
    return rounds(size, [[(s, t, nbytes) for s, t in enumerate(targets) if s != t]])


def parking_lot(size: int, nbytes: int) -> list[Steps]:
    """One over all links of a line, and one over each: it shares with all of them."""
    short = [(r, r + 1, nbytes * (1 + r)) for r in range(size - 1)]
    return rounds(size, [[(0, size - 1, 2 * nbytes), *short[1:]], short[:1]])


def random_traffic(size: int, nbytes: int) -> list[Steps]:
    """Each computes, then all send to two others; four times."""
    draw = random.Random(5)
    ranks: list[Steps] = [[] for _ in range(size)]
    for _ in range(4):
        pairs = {(s, t) for s in range(size) for t in draw.sample(range(size), 2)}
        messages = [
            (s, t, draw.randrange(1, nbytes)) for s, t in sorted(pairs) if s != t
        ]
        for steps, step in zip(ranks, rounds(size, [messages]), strict=True):
            steps += [draw.random() * 1e-5, *step]
    return ranks


def line(size: int, latency: float = 0.0) -> Topology:
    """Ranks in a row; the latencies of a route add up."""
    return table(size, {(r, r + 1): (latency, 1e9) for r in range(size - 1)})


PATTERNS: dict[str, tuple[Topology, int, Callable[[int, int], list[Steps]], int]] = {
    "ring all-reduce": (nvlink(8), 8, ring, 32 * MEGABYTE),
    "ring all-reduce over nodes": (dgx_h100(2), 16, ring, 32 * MEGABYTE),
    "tree all-reduce": (dgx_h100(2), 16, tree, MEGABYTE),
    "halving-doubling": (
        fat_tree(2, leaf=1, oversubscription=4), 16, halving_doubling, 16 * MEGABYTE,
    ),
    "all-to-all": (dgx_h100(2), 16, all_to_all, 16 * MEGABYTE),
    "all-to-all, uneven": (
        fat_tree(2, leaf=1, oversubscription=4), 16, uneven_all_to_all, MEGABYTE,
    ),
    "incast": (dgx_h100(2), 16, incast, MEGABYTE),
    "outcast": (dgx_h100(1), 8, outcast, MEGABYTE),
    # SimGrid's flows share a link by their latencies, as TCP's by round-trip times, and
    # ours equally. So latencies are 0 where routes of different lengths share.
    "shift on a ring of chips": (tpu_torus(8), 8, shift, MEGABYTE),
    "permutation on a torus": (
        tpu_torus(4, 4, latency=0.0), 16, permutation, 4 * MEGABYTE,
    ),
    "parking lot": (line(5), 5, parking_lot, MEGABYTE),
    "random traffic": (
        fat_tree(4, leaf=1, oversubscription=8), 32, random_traffic, 2 * MEGABYTE,
    ),
}  # fmt: skip


def take(ranks: list[Steps]) -> None:
    """The steps of this rank, as torch's messages without data."""
    for step in ranks[dist.get_rank()]:
        if isinstance(step, float):
            advance(step)
            continue
        works = []
        for messages, move in zip(step, (dist.isend, dist.irecv), strict=True):
            for peer, nbytes in messages:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                works.append(move(tensor, peer))
        for work in works:
            work.wait()


def ours(topology: Topology, ranks: list[Steps]) -> list[float]:
    """When each rank ends on the virtual cluster."""
    cluster = VirtualCluster(len(ranks), topology)
    cluster.run(take, ranks)
    return cluster.seconds


def simgrids(topology: Topology, ranks: list[Steps]) -> list[float]:
    """When each rank ends by SimGrid, in a process of the system's interpreter."""
    pairs = {(r, peer) for r, steps in enumerate(ranks) for step in steps
             if not isinstance(step, float) for peer, _ in step[0]}  # fmt: skip
    routes = {}
    for source, target in sorted(pairs):
        route = topology.route(source, target)
        routes[f"{source} {target}"] = route.latency, route.links
    given = {"links": dict(topology.bandwidth), "routes": routes, "ranks": ranks}
    done = subprocess.run(
        [PYTHON, SCRIPT], input=json.dumps(given), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def record(path: Path) -> None:
    """Both ends of every pattern, for the page."""
    rows = []
    for name, (topology, size, make, nbytes) in PATTERNS.items():
        ranks = make(size, nbytes)
        found, theirs = ours(topology, ranks), simgrids(topology, ranks)
        worst = max(
            abs(a / b - 1) if b else a for a, b in zip(found, theirs, strict=True)
        )
        rows.append(
            {
                "pattern": name, "topology": topology.name, "ranks": size,
                "seconds": max(found), "simgrid_seconds": max(theirs),
                "worst_rank": worst,
            }
        )  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":  # python -m tests.cluster.simgrid_patterns FILE
    record(Path(sys.argv[1]))
