"""The steps of a ring, and the receives that are posted ahead of them."""

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, Work, message_rounds
from xtrain.comm.ring_steps import post_ring_recvs, ring_send_recv, wait_all


def steps() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    in_flight: list[Work] = []
    mine = [torch.full((1000,), float(10 * rank + step)) for step in range(4)]
    for step, tensor in enumerate(mine):
        arriving = torch.empty(1000)
        in_flight.append(ring_send_recv(tensor, arriving))
        # It has arrived although nobody has waited for anything yet.
        assert arriving.tolist() == [10.0 * ((rank - 1) % size) + step] * 1000
    wait_all(in_flight)
    assert in_flight == []

    # An empty half is no message, and the other half still arrives.
    full, empty, arriving = torch.ones(3), torch.empty(0), torch.zeros(3)
    if rank == 0:
        step = ring_send_recv(full, empty)
        assert (len(step._keep), len(step._works)) == (0, 1)
    elif rank == 1:
        step = ring_send_recv(empty, arriving)
        assert arriving.tolist() == [1.0] * 3
        assert (len(step._keep), len(step._works)) == (1, 0)
    else:
        step = ring_send_recv(empty, empty)
    step.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring_steps:ring_send_recv", "xtrain.comm.ring_steps:wait_all"
)
def test_a_step_waits_for_what_arrives_and_not_for_what_leaves(world, size):
    world(size).run(steps)


def steps_posted_ahead() -> tuple[list, list[list]]:
    """Chunks of 5, 0 and 7 go round; every receive is posted before the first send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, counts = (rank - 1) % size, (5, 0, 7)
    in_flight: list[Work] = []
    with CommLedger() as ledger:
        receives = post_ring_recvs([torch.zeros(count) for count in counts])
        early = [(e.kind, e.payload) for e in ledger.events]
        for step, posted in enumerate(receives):
            mine = torch.full((counts[step],), float(10 * rank + step))
            in_flight.append(ring_send_recv(mine, posted))
            assert posted.tensor.tolist() == [10.0 * before + step] * counts[step]
    wait_all(in_flight)
    return early, ledger.events


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.ring_steps:PostedRecv", "xtrain.comm.ring_steps:post_ring_recvs"
)
def test_receives_posted_ahead_belong_to_the_round_of_their_send(world, size):
    results = world(size).run(steps_posted_ahead)
    early = [] if size == 1 else [("recv", 20), ("recv", 28)]
    if world(size).backend != "nccl":  # which posts each with its send
        assert all(posted == early for posted, _ in results)
    rounds = message_rounds([events for _, events in results])
    assert [[m.nbytes for m in r] for r in rounds] == [
        [nbytes] * size for _, nbytes in early
    ]
