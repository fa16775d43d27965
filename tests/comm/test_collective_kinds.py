"""One table of how collectives are called, held against what each of them means."""

import pytest
import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.comm.collective_kinds import KINDS, kind_of, prepare
from xtrain.testing import expect_error

ROOT = 1
OURS = [
    "all_reduce", "ring_all_reduce", "tree_all_reduce", "one_shot_all_reduce",
    "parameter_server_all_reduce", "broadcast", "broadcast_naive", "reduce",
    "reduce_scatter_tensor", "ring_reduce_scatter", "all_gather_into_tensor",
    "ring_all_gather", "all_to_all_single", "gather", "scatter", "barrier",
]  # fmt: skip
TORCHS = {
    "all_reduce": dist.all_reduce,
    "broadcast": dist.broadcast,
    "reduce": dist.reduce,
    "reduce_scatter": REDUCE_SCATTER,
    "all_gather": ALL_GATHER,
    "all_to_all": dist.all_to_all_single,
    "gather": dist.gather,
    "scatter": dist.scatter,
    "barrier": dist.barrier,
}


def expected(kind, wholes, rank):
    """What a rank gets, from everybody's whole tensors; None for nothing certain."""
    parts = [whole.chunk(len(wholes)) for whole in wholes]
    total = torch.stack(wholes).sum(0)
    if kind in ("reduce", "gather") and rank != ROOT:
        return None
    return {
        "all_reduce": total,
        "reduce": total,
        "broadcast": wholes[ROOT],
        "reduce_scatter": total.chunk(len(wholes))[rank],
        "all_gather": torch.cat([mine[at] for at, mine in enumerate(parts)]),
        "gather": torch.cat([mine[at] for at, mine in enumerate(parts)]),
        "all_to_all": torch.cat([theirs[rank] for theirs in parts]),
        "scatter": parts[ROOT][rank],
        "barrier": wholes[rank],
    }[kind]


def call_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    named = [(name, getattr(comm, name)) for name in OURS]
    for name, function in [*named, *TORCHS.items()]:
        kind = kind_of(name)
        wholes = [torch.arange(2.0 * size) + 100 * other for other in range(size)]
        right = expected(kind, wholes, rank)
        call = prepare(kind, function, wholes[rank].clone(), ROOT)
        call.run()
        if right is not None:
            assert torch.equal(call.result, right), (name, call.result, right)


@pytest.mark.verifies(
    "xtrain.comm.collective_kinds:prepare", "xtrain.comm.collective_kinds:kind_of"
)
@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_is_called_as_it_is_meant(world, size):
    if world(size).backend not in ("gloo", "xtrain-virtual"):
        pytest.skip("torch's collectives on the backend that has all of them")
    world(size).run(call_all)
    assert {kind_of(name) for name in OURS} == set(KINDS) == set(TORCHS)


def of_seven_elements():
    prepare("all_gather", print, torch.ones(7))


@pytest.mark.verifies("xtrain.comm.collective_kinds:prepare")
def test_parts_must_be_equal_and_kinds_known(world):
    expect_error(world(2), of_seven_elements, match="7 elements on 2 ranks")
    with pytest.raises(ValueError, match="'swap' is not one of"):
        prepare("swap", print, torch.ones(2))
    with pytest.raises(ValueError, match="'swap' names none of"):
        kind_of("swap")
