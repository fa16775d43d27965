"""The words for where ranks ran a function."""

import pytest

from xtrain.evidence.results import Result
from xtrain_docs.places import places, short

CPU = {"device": "cpu"}
H100 = {"device": "cuda", "gpus": 1, "gpu": "NVIDIA H100 80GB HBM3"}
TWO = H100 | {"gpus": 2}


def ran(about, backend, *sizes):
    at = [(backend, size) for size in sizes]
    return Result("t", "passed", at, "2.13", about)


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([ran(CPU, "gloo", 4, 1), ran(CPU, "gloo", 2)], "gloo on 1, 2, 4 ranks"),
        (
            [ran(H100, "nccl", 1), ran(CPU, "gloo", 1, 8)],
            "gloo on 1, 8 ranks; NCCL on 1 rank (no message), H100",
        ),
        (
            [ran(CPU, "gloo", 2), ran(CPU, "xtrain-shm", 4)],
            "gloo on 2 ranks; xtrain-shm on 4 ranks",
        ),
        ([ran(TWO, "nccl", 2, 1)], "NCCL on 1, 2 ranks, 2 H100"),
        (
            [ran(H100, "nccl", 1, 2), ran(TWO, "nccl", 2, 4, 8)],
            "NCCL on 1, 2 ranks, H100 (shared from 2 ranks on); "
            "NCCL on 2, 4, 8 ranks, 2 H100 (shared from 4 ranks on)",
        ),
        ([ran(CPU, "gloo", 1)], "gloo on 1 rank (no message)"),
        ([ran(CPU, "gloo"), ran(H100, "nccl")], ""),
        ([], ""),
    ],
)
def test_each_backend_has_its_own_world_sizes(tests, words):
    assert places(tests) == words


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
    ],
)
def test_a_gpu_has_a_short_name(name, shown):
    assert short(name) == shown
