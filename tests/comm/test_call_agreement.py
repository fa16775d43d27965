"""The number that a check reduces is the sum, and no ledger counts it."""

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.comm.call_agreement import reduce_question


def reduced() -> None:
    number = torch.tensor([dist.get_rank() + 1])
    with CommLedger() as ledger:
        reduce_question(number, None)
    size = dist.get_world_size()
    assert number.item() == size * (size + 1) // 2
    assert ledger.events == []


@pytest.mark.parametrize("size", [1, 3])
def test_no_ledger_counts_the_question_of_a_check(world, size):
    world(size).run(reduced)
