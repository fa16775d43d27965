"""None where a tensor belongs, on one rank: named there, and on all when asked to."""

import pytest
import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.comm.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)


def calls(tensor, pairs=None):
    """Every collective, with `tensor` where one of four elements belongs.

    `pairs` is what `all_to_all_single` sends: two elements to each rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    four, whole = torch.ones(4), torch.ones(size, 4)
    pieces = [torch.ones(4) for _ in range(size)]
    with_one = [tensor, *pieces[1:]]
    root = rank == 0
    return {
        "broadcast": lambda: comm.broadcast(tensor, 0),
        "broadcast_naive": lambda: comm.broadcast_naive(tensor, 0),
        "reduce": lambda: comm.reduce(tensor, 0),
        "all_reduce": lambda: comm.all_reduce(tensor),
        "gather": lambda: comm.gather(tensor, pieces if root else None),
        "scatter": lambda: comm.scatter(tensor, pieces if root else None),
        "all_gather": lambda: comm.all_gather(pieces, tensor),
        "all_gather list": lambda: comm.all_gather(with_one, four),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(whole, tensor),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor, pieces),
        "reduce_scatter list": lambda: comm.reduce_scatter(four, with_one),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(tensor, whole),
        "ring_all_reduce": lambda: comm.ring_all_reduce(tensor),
        "tree_all_reduce": lambda: comm.tree_all_reduce(tensor),
        "one_shot": lambda: comm.one_shot_all_reduce(tensor),
        "server": lambda: comm.parameter_server_all_reduce(tensor),
        "halving": lambda: comm.halving_doubling_all_reduce(tensor),
        "direct": lambda: direct_all_reduce(tensor).wait(),
        "direct_gather": lambda: direct_all_gather(whole, tensor).wait(),
        "direct_scatter": lambda: direct_reduce_scatter(tensor, whole).wait(),
        "all_to_all": lambda: comm.all_to_all(pieces, with_one),
        "all_to_all_single": lambda: comm.all_to_all_single(tensor, pairs),
    }


def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "accepted"


def on_rank_1_alone():
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs, messages = torch.ones(2 * size), {}
    with comm.debug_checks():
        for name in calls(pairs):
            right = pairs if name == "all_to_all_single" else torch.ones(4)
            mine = None if rank == 1 else right
            messages[name] = said(calls(mine, pairs)[name])
    return messages


@pytest.mark.verifies("xtrain.comm.debug_checks:debug_checks")
def test_under_debug_checks_every_rank_hears_of_it(world):
    for messages in world(3).run(on_rank_1_alone):
        for name, message in messages.items():
            assert "expected a tensor, got NoneType" in message, (name, message)
            assert "rank 1" in message, (name, message)


def on_all_ranks():
    messages = {name: said(call) for name, call in calls(None, torch.ones(4)).items()}
    size, four = dist.get_world_size(), torch.ones(4)
    lists = [
        lambda: comm.all_gather(None, four),
        lambda: comm.reduce_scatter(four, None),
        lambda: comm.all_to_all(None, None),
    ]
    whole = torch.ones(size, 4)
    wholes = [
        lambda: comm.all_gather_into_tensor(None, four),
        lambda: comm.reduce_scatter_tensor(four, None),
        lambda: direct_all_gather(None, four),
        lambda: direct_reduce_scatter(four, None),
    ]
    assert whole.numel() == 4 * size
    return messages, [said(c) for c in lists], [said(c) for c in wholes]


def test_none_is_named_without_debug_checks_too(world):
    for messages, lists, wholes in world(2).run(on_all_ranks):
        for name, message in messages.items():
            assert "expected a tensor, got NoneType" in message, (name, message)
        for message in lists:
            assert "for 2 ranks" in message
        for message in wholes:
            assert "expected a tensor, got NoneType" in message


def to_itself():
    rank, tensor = dist.get_rank(), torch.ones(2)
    messages = [
        said(lambda: comm.send(tensor, rank)),
        said(lambda: comm.recv(tensor, rank)),
        said(lambda: comm.isend(tensor, group_dst=rank)),
        said(lambda: comm.irecv(tensor, group_src=rank)),
    ]
    landing = torch.zeros(2)
    comm.exchange(tensor, rank, landing, rank)
    assert landing.tolist() == [1.0, 1.0]
    return messages


@pytest.mark.verifies("xtrain.comm.p2p:isend", "xtrain.comm.p2p:irecv")
def test_a_message_to_oneself_is_refused_and_an_exchange_copies(world):
    for rank, messages in enumerate(world(2).run(to_itself)):
        for message in messages:
            assert f"group rank {rank} is this rank itself" in message
