"""The steps of a ring, and the receives that are posted ahead of them."""

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, message_rounds
from xtrain.comm.ring_steps import RingSteps


def steps() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = RingSteps()
    mine = [torch.full((1000,), float(10 * rank + step)) for step in range(4)]
    for step, tensor in enumerate(mine):
        arriving = torch.empty(1000)
        ring.send_recv(tensor, arriving)
        # It has arrived although nobody has waited for the sends yet.
        assert arriving.tolist() == [10.0 * ((rank - 1) % size) + step] * 1000
        assert len(ring._taken) == step + 1  # kept to the end
        assert [len(works) for works in ring._taken[-1]] == [1, 1]
    ring.wait_sends()
    assert ring._taken == []

    # An empty half is no message, and the other half still arrives.
    full, empty, arriving = torch.ones(3), torch.empty(0), torch.zeros(3)
    if rank == 0:
        ring.send_recv(full, empty)
        assert [len(works) for works in ring._taken[0]] == [0, 1]
    elif rank == 1:
        ring.send_recv(empty, arriving)
        assert arriving.tolist() == [1.0] * 3
        assert [len(works) for works in ring._taken[0]] == [1, 0]
    else:
        ring.send_recv(empty, empty)
        assert [len(works) for works in ring._taken[0]] == [0, 0]
    ring.wait_sends()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies("xtrain.comm.ring_steps:RingSteps")
def test_a_step_waits_for_what_arrives_and_not_for_what_leaves(world, size):
    world(size).run(steps)


def steps_posted_ahead() -> tuple[list, list[list]]:
    """Chunks of 5, 0 and 7 go round; every receive is posted before the first send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, counts = (rank - 1) % size, (5, 0, 7)
    arriving = [torch.zeros(count) for count in counts]
    ring = RingSteps()
    with CommLedger() as ledger:
        ring.post_recvs(arriving)
        early = [(e.kind, e.payload) for e in ledger.events]
        for step, tensor in enumerate(arriving):
            mine = torch.full((counts[step],), float(10 * rank + step))
            ring.send_recv(mine, tensor)
            assert tensor.tolist() == [10.0 * before + step] * counts[step]
    ring.wait_sends()
    return early, ledger.events


@pytest.mark.parametrize("size", [2, 3, 4])  # one rank alone has no steps
@pytest.mark.verifies("xtrain.comm.ring_steps:RingSteps")
def test_receives_posted_ahead_belong_to_the_round_of_their_send(world, size):
    results = world(size).run(steps_posted_ahead)
    early = [("recv", 20), ("recv", 28)]
    if world(size).backend != "nccl":  # which posts each with its send
        assert all(posted == early for posted, _ in results)
    rounds = message_rounds([events for _, events in results])
    assert [[m.nbytes for m in r] for r in rounds] == [
        [nbytes] * size for _, nbytes in early
    ]
