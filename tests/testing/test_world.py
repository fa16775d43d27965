"""World: results in rank order, one process per rank."""

import os

import pytest
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def ranks_sum() -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), total


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad split on rank {rank}")
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_living_ranks(world, size):
    first = world(size).run(ranks_sum)
    second = world(size).run(ranks_sum)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == size
    assert all(total == size * (size - 1) / 2 for _, total in first)


def test_a_failing_rank_keeps_its_type_and_traceback(world):
    with pytest.raises(ValueError, match="bad split on rank 2") as caught:
        world(4).run(fail_on, 2)
    assert isinstance(caught.value, RankError)
    assert "in fail_on" in str(caught.value)
    assert world(4).run(ranks_sum)


def test_a_closed_world_starts_again():
    with World(2) as pair:
        pair.run(ranks_sum)
    assert pair.run(ranks_sum)
    pair.close()
