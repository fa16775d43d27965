"""Where ranks ran a function, in words: each backend with its own numbers of ranks.

gloo on 1, 2, 4 ranks; NCCL on 1, 2, 4 ranks, 2 H100 (shared from 4 ranks on)
gloo on 2 ranks; NCCL on 1 rank (no message), H100
"""

import re
from collections.abc import Iterable

from xtrain.evidence.results import Result

NAMES = {"nccl": "NCCL"}


def places(tests: Iterable[Result]) -> str:
    """Empty for what no rank has to run."""
    sizes: dict[tuple[bool, str, int, str], set[int]] = {}
    for test in tests:
        gpus, gpu = test.about.get("gpus", 0), test.about.get("gpu", "")
        for backend, size in test.places:
            sizes.setdefault((gpus > 0, backend, gpus, gpu), set()).add(size)
    return "; ".join(
        _place(backend, sorted(sizes[on]), gpus, gpu)
        for on in sorted(sizes)
        for _, backend, gpus, gpu in [on]
    )


def _place(backend: str, sizes: list[int], gpus: int, gpu: str) -> str:
    ranks = f"{', '.join(map(str, sizes))} ranks"
    if sizes == [1]:
        ranks = "1 rank (no message)"
    place = f"{NAMES.get(backend, backend)} on {ranks}"
    if not gpus:
        return place
    place += f", {f'{gpus} ' if gpus > 1 else ''}{short(gpu)}"
    shared = [size for size in sizes if size > gpus]
    return place + (f" (shared from {shared[0]} ranks on)" if shared else "")


def short(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 as H100, NVIDIA GeForce RTX 4090 without the maker."""
    name = gpu.removeprefix("NVIDIA ")
    found = re.match(r"[A-Z]+\d\w*", name)
    return found[0] if found else name
