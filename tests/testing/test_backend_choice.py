"""Which backend and device, decided for machines that are not here."""

from dataclasses import replace

import pytest

from xtrain.testing.backend_choice import (
    SHARING_ENVIRONMENT,
    Choice,
    Machine,
    choose,
    explain_sharing,
    rank_environment,
    registration,
)

NONE = Machine()
OLD = Machine(gpus=1, nccl=(2, 29, 7))
ONE = Machine(gpus=1, nccl=(2, 30, 7))
EIGHT = Machine(gpus=8, nccl=(2, 28, 9))


@pytest.mark.parametrize(
    ("machine", "backend", "device", "reason"),
    [
        (NONE, "gloo", "cpu", "no GPU"),
        (EIGHT, "nccl", "cuda", "8 GPUs"),
        (ONE, "gloo", "cpu", "1 of 4 GPUs; they can be shared: try --backend nccl"),
        (OLD, "gloo", "cpu", "1 of 4 GPUs; for small worlds try --backend nccl"),
    ],
)
def test_the_default_takes_nccl_where_there_are_enough_gpus(
    machine, backend, device, reason
):
    assert choose(None, None, machine) == Choice(backend, device, reason)


@pytest.mark.parametrize(
    ("backend", "device", "machine", "expected"),
    [
        ("nccl", None, ONE, ("nccl", "cuda")),
        (None, "cuda", ONE, ("nccl", "cuda")),
        ("gloo", "cuda", ONE, ("gloo", "cuda")),
        ("gloo", None, EIGHT, ("gloo", "cpu")),
        (None, "cpu", EIGHT, ("gloo", "cpu")),
        ("xtrain-shm", None, EIGHT, ("xtrain-shm", "cpu")),
    ],
)
def test_what_the_user_asks_for_is_taken(backend, device, machine, expected):
    choice = choose(backend, device, machine)
    assert (choice.backend, choice.device, choice.reason) == (*expected, "as asked")


@pytest.mark.parametrize(
    ("backend", "device", "machine", "message"),
    [
        ("nccl", None, NONE, "needs a GPU that torch can see"),
        ("nccl", "cpu", ONE, "GPU memory only"),
        ("mpi", None, ONE, "'mpi' is none of gloo, nccl"),
        ("gloo", "tpu", ONE, "'tpu' is none of cpu, cuda, xgpu"),
    ],
)
def test_impossible_pairs_are_refused(backend, device, machine, message):
    with pytest.raises(ValueError, match=message):
        choose(backend, device, machine)


NCCL = Choice("nccl", "cuda", "as asked")


def test_ranks_outnumbering_gpus_share_them_with_a_new_nccl():
    seen = {"CUDA_VISIBLE_DEVICES": "3"}
    one, old = replace(ONE, visible="3"), replace(OLD, visible="3")
    assert rank_environment(1, NCCL, one) == seen
    assert rank_environment(8, NCCL, EIGHT) == {"CUDA_VISIBLE_DEVICES": ""}
    assert rank_environment(4, NCCL, one) == seen | SHARING_ENVIRONMENT
    assert rank_environment(4, Choice("gloo", "cuda", ""), old) == seen
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(
        1, Choice("gloo", "cpu", ""), one
    )


@pytest.mark.parametrize("machine", [OLD, Machine(gpus=1, nccl=None)])
def test_an_old_nccl_is_told_in_one_line(machine):
    with pytest.raises(ValueError, match="4 ranks need 4 GPUs, there are 1") as caught:
        rank_environment(4, NCCL, machine)
    assert "needs NCCL 2.30 or newer, found" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_header_says_what_happens_to_larger_worlds():
    assert explain_sharing(Choice("gloo", "cpu", ""), ONE) == ""
    assert explain_sharing(NCCL, ONE) == (
        "worlds larger than 1 share GPUs: NCCL_MULTI_RANK_GPU_ENABLE=1 "
        "NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2"
    )
    assert explain_sharing(NCCL, OLD) == (
        "worlds larger than 1 are skipped: 2 ranks need 2 GPUs, there are 1: sharing "
        "one needs NCCL 2.30 or newer, found 2.29.7"
    )


def test_torchs_own_backends_need_no_loading():
    registration("gloo")()
    registration("nccl")()
