"""A pass around a ring: what a wait waits for, receives posted ahead, visits."""

import pytest
import torch
import torch.distributed as dist

from tests.devices import NCCL
from xtrain.comm import CommLedger, message_rounds
from xtrain.comm.p2p import follows_nccl
from xtrain.comm.ring_pass import RingPass


def step(ring: RingPass, send: torch.Tensor, recv: torch.Tensor) -> list[int]:
    """Take a step; how many messages it posted: to arrive, to leave."""
    before = len(ring._leaving)
    ring.start(send, recv)
    arriving = len(ring._arriving)
    ring.wait_recv()
    assert ring._arriving == []
    return [arriving, len(ring._leaving) - before]


def steps() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = RingPass()
    # A batch has one work: who waits for what arrives waits for what leaves.
    apart = not follows_nccl(dist.group.WORLD, torch.get_default_device())
    mine = [torch.full((1000,), float(10 * rank + step)) for step in range(4)]
    for number, tensor in enumerate(mine):
        arriving = torch.empty(1000)
        assert step(ring, tensor, arriving) == [1, int(apart)]
        # It has arrived, and the sends have not been waited for.
        assert arriving.tolist() == [10.0 * ((rank - 1) % size) + number] * 1000
        assert len(ring._arrived) == number + 1
        assert len(ring._leaving) == apart * (number + 1)
    ring.wait()
    assert ring._leaving == ring._arrived == []
    assert len(ring._kept) == 4 + 4 * apart  # gloo spins to free what has just arrived
    ring.wait()
    assert ring._kept == []

    # An empty half is no message, and the other half still arrives.
    full, empty, arriving = torch.ones(3), torch.empty(0), torch.zeros(3)
    if rank == 0:
        assert step(ring, full, empty) == [0, 1]
    elif rank == 1:
        assert step(ring, empty, arriving) == [1, 0]
        assert arriving.tolist() == [1.0] * 3
    else:
        assert step(ring, empty, empty) == [0, 0]
    ring.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies("xtrain.comm.ring_pass:RingPass")
def test_a_step_waits_for_what_arrives_and_not_for_what_leaves(world, size):
    world(size).run(steps)


def steps_posted_ahead() -> tuple[list, list[list]]:
    """Chunks of 5, 0 and 7 go round; every receive is posted before the first send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, counts = (rank - 1) % size, (5, 0, 7)
    arriving = [torch.zeros(count) for count in counts]
    ring = RingPass()
    with CommLedger() as ledger:
        ring.post_recvs(arriving)
        early = [(e.kind, e.payload) for e in ledger.events]
        for number, tensor in enumerate(arriving):
            mine = torch.full((counts[number],), float(10 * rank + number))
            step(ring, mine, tensor)
            assert tensor.tolist() == [10.0 * before + number] * counts[number]
    ring.wait()
    return early, ledger.events


@pytest.mark.parametrize("size", [2, 3, 4])  # one rank alone has no steps
@pytest.mark.verifies("xtrain.comm.ring_pass:RingPass")
def test_receives_posted_ahead_belong_to_the_round_of_their_send(world, size):
    results = world(size).run(steps_posted_ahead)
    early = [("recv", 20), ("recv", 28)]
    if world(size).backend not in NCCL:  # which post each with its send
        assert all(posted == early for posted, _ in results)
    rounds = message_rounds([events for _, events in results])
    assert [[m.nbytes for m in r] for r in rounds] == [
        [nbytes] * size for _, nbytes in early
    ]


def visits_of_all() -> list[list[int]]:
    """Owners in the order of their visits; and what comes back from `by` ranks on."""
    ring, found = RingPass(), []
    x = torch.full((3, 4), float(ring.rank)).t()  # not contiguous
    for steps in (None, 1, 2):
        owners = []
        for owner, visitor in ring.visits(x, steps):
            assert visitor.equal(torch.full((4, 3), float(owner)))
            owners.append(owner)
        found.append(owners)
    for by in (-1, 0, 1, ring.size):
        other = ring.pass_on(x.contiguous(), by)
        ring.wait()
        assert other.eq((ring.rank - by) % ring.size).all()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.verifies("xtrain.comm.ring_pass:RingPass")
def test_every_rank_sees_the_tensors_of_those_before_it(world, size):
    for rank, found in enumerate(world(size).run(visits_of_all)):
        back = [(rank - step) % size for step in range(max(size, 2))]
        assert found == [back[:size], back[:1], back[:2]]
