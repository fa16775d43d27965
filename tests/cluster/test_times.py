"""The virtual clock against closed forms: collectives, pipelines, overlap."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.cluster import (
    VirtualCluster,
    advance,
    dgx_h100,
    fat_tree,
    flat,
    now,
    nvlink,
    tpu_torus,
)
from xtrain.comm import (
    halving_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.plan.hardware import Accelerator
from xtrain.schedules import gpipe, one_f_one_b, simulate

ALPHA, BANDWIDTH = 5e-6, 50e9
BETA = 1 / BANDWIDTH
FLOATS = 3 * 64 * 64  # divides by every size, and so do its halves
BYTES = 4.0 * FLOATS
SIZES = 2, 3, 8, 64
NETWORK = "xtrain.cluster.network"


def near(seconds: float):
    return pytest.approx(seconds, rel=1e-9)


def last_of(topology, size: int, program, *args) -> float:
    """The latest clock after a program."""
    cluster = VirtualCluster(size, topology, checks=False)
    cluster.run(program, *args)
    return max(cluster.seconds)


def log2_up(size: int) -> int:
    return math.ceil(math.log2(size))


# -- our collectives, message by message


def ring_form(size: int) -> float:
    return 2 * (size - 1) * (ALPHA + BYTES / size * BETA)


def half_ring_form(size: int) -> float:
    return (size - 1) * (ALPHA + BYTES / size * BETA)


def tree_form(size: int) -> float:
    return 2 * log2_up(size) * (ALPHA + BYTES * BETA)


def halving_doubling_form(size: int) -> float:
    """Beyond a power of two: one more tensor in before, and one out after."""
    power = 1 << (size.bit_length() - 1)
    inner = 2 * log2_up(power) * ALPHA + 2 * (power - 1) / power * BYTES * BETA
    return inner + (0.0 if power == size else 2 * (ALPHA + BYTES * BETA))


def gathers(size: int) -> None:
    ring_all_gather(torch.empty(FLOATS), torch.empty(FLOATS // size))


def scatters(size: int) -> None:
    ring_reduce_scatter(torch.empty(FLOATS // size), torch.empty(FLOATS))


OURS = {
    "ring": (lambda size: ring_all_reduce(torch.ones(FLOATS)), ring_form),
    "tree": (lambda size: tree_all_reduce(torch.ones(FLOATS)), tree_form),
    "halving-doubling": (
        lambda size: halving_doubling_all_reduce(torch.ones(FLOATS)),
        halving_doubling_form,
    ),
    "all-gather": (gathers, half_ring_form),
    "reduce-scatter": (scatters, half_ring_form),
}


@pytest.mark.verifies("xtrain.cluster.topology:flat", f"{NETWORK}:PrivateLinks")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OURS)
def test_our_collectives_take_what_alpha_and_beta_say(name, size):
    program, form = OURS[name]
    found = last_of(flat(ALPHA, BANDWIDTH), size, program, size)
    assert found == near(form(size))


# -- torch's collectives


def torch_all_reduce(floats: int) -> None:
    dist.all_reduce(torch.ones(floats, device="meta"))


def torch_all_gather(size: int) -> None:
    ALL_GATHER(torch.empty(FLOATS), torch.empty(FLOATS // size))


def torch_reduce_scatter(size: int) -> None:
    REDUCE_SCATTER(torch.empty(FLOATS // size), torch.empty(FLOATS))


def torch_all_to_all(size: int) -> None:
    dist.all_to_all_single(torch.empty(FLOATS), torch.empty(FLOATS))


def torch_broadcast(size: int) -> None:
    dist.broadcast(torch.empty(FLOATS), size - 1)


def barrier(size: int) -> None:
    dist.barrier()


@pytest.mark.verifies("xtrain.cluster.costs:Pattern")
@pytest.mark.verifies("xtrain.cluster.costs:patterns_of")
@pytest.mark.parametrize("size", SIZES)
def test_torchs_collectives_take_what_their_patterns_say(size):
    share = (size - 1) / size * BYTES
    right = {
        torch_all_gather: (size - 1) * ALPHA + share * BETA,
        torch_reduce_scatter: (size - 1) * ALPHA + share * BETA,
        torch_all_to_all: ALPHA + BYTES / size * BETA,
        torch_broadcast: (size - 1) * ALPHA + BYTES * BETA,
        barrier: 2 * log2_up(size) * ALPHA,
    }
    for program, seconds in right.items():
        assert last_of(flat(ALPHA, BANDWIDTH), size, program, size) == near(seconds)


@pytest.mark.parametrize("floats", [8, 16_000_000])
def test_an_all_reduce_goes_by_ring_or_trees_as_is_faster(floats):
    """On a switch each rank has one way out: trees put up to twice the bytes on it."""
    link = Accelerator.preset("h100").link.bandwidth
    ring = 14 * 2e-6 + 2 * 7 / 8 * 4 * floats / link
    tree = 2 * 3 * 2e-6 + 2 * 4 * floats / link
    found = last_of(nvlink(8), 8, torch_all_reduce, floats)
    assert found == near(min(ring, tree))
    assert (ring < tree) is (floats > 8)


# -- links that are shared


def long_way(rank: int, size: int) -> None:
    """To the chip two places on, all at once."""
    sent = dist.isend(torch.zeros(250_000), (rank + 2) % size)
    dist.recv(torch.zeros(250_000), (rank - 2) % size)
    sent.wait()


def from_first_node(rank: int, size: int) -> None:
    """Each rank of the first half to its like in the second."""
    half = size // 2
    if rank < half:
        dist.send(torch.zeros(250_000), rank + half)
    else:
        dist.recv(torch.zeros(250_000), rank - half)


@pytest.mark.verifies("xtrain.cluster.topology:nvlink", f"{NETWORK}:SharedLinks")
@pytest.mark.verifies("xtrain.cluster.topology:tpu_torus")
@pytest.mark.verifies("xtrain.cluster.topology:dgx_h100")
@pytest.mark.verifies("xtrain.cluster.topology:fat_tree")
def test_messages_share_the_links_that_they_cross():
    h100, tpu = Accelerator.preset("h100"), Accelerator.preset("tpu-v5p")
    adapter = 1e6 / h100.network.bandwidth
    # all 7 pieces of a rank go up over its own link
    every = 2e-6 + 7 / 8 * BYTES / h100.link.bandwidth
    assert last_of(nvlink(8), 8, torch_all_to_all, 8) == near(every)
    # two messages on each link of the ring of chips, three hops are not needed
    assert last_of(tpu_torus(8), 8, long_way) == near(2e-6 + 2e6 / tpu.link.bandwidth)
    # each GPU has its adapter
    assert last_of(dgx_h100(2), 16, from_first_node) == near(5e-6 + adapter)
    # 8 adapters share an uplink of a quarter of their bandwidth
    spine = fat_tree(2, leaf=1, oversubscription=4)
    assert last_of(spine, 16, from_first_node) == near(5e-6 + 4 * adapter)


def test_an_all_to_all_between_nodes_waits_for_the_adapters():
    network = Accelerator.preset("h100").network.bandwidth
    found = last_of(dgx_h100(2), 16, torch_all_to_all, 16)
    assert found == near(5e-6 + 8 / 16 * BYTES / network)


# -- pipelines


FORWARD, BACKWARD = 1.0, 2.0


class Takes(torch.autograd.Function):
    """Virtual seconds in forward and in backward."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append(now())
        advance(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(now())
        advance(BACKWARD)
        return grad.clone(), None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.begins: list[float] = []

    def forward(self, x):
        return Takes.apply(x * self.scale, self.begins)


def square(output, target):
    return (output - target).square().sum(), len(target)


def pipelined(make, batches):
    """When each action of the second step begins; headers go in the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Stage()
    runner = PipelineRunner(
        PipelineStage(module, rank, size), make(size, batches), square
    )
    for _ in range(2):
        module.begins.clear()
        dist.barrier()
        runner.step(torch.ones(batches, 4), torch.ones(batches, 4))
    return module.begins


@pytest.mark.verifies("xtrain.cluster.clock:advance", "xtrain.cluster.clock:now")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("ranks", "batches"), [(2, 3), (3, 7), (4, 8)])
def test_a_pipeline_begins_each_action_where_the_simulation_does(make, ranks, batches):
    """The runner's messages, headers and handshakes against schedules' arithmetic."""
    found = VirtualCluster(ranks).run(pipelined, make, batches)
    timeline = simulate(make(ranks, batches), FORWARD, BACKWARD, 0.0)
    begin = min(begins[0] for begins in found)
    for begins, starts in zip(found, timeline.starts, strict=True):
        assert [each - begin for each in begins] == near(list(starts))
    assert timeline.makespan == (batches + ranks - 1) * (FORWARD + BACKWARD)


# -- overlap


def computes_meanwhile(seconds: float):
    work = dist.all_reduce(torch.ones(FLOATS), async_op=True)
    advance(seconds)
    work.wait()
    reduced = now()
    gathered = ALL_GATHER(
        torch.empty(FLOATS), torch.ones(FLOATS // dist.get_world_size()), async_op=True
    )
    gathered.wait()
    return reduced, now()


@pytest.mark.parametrize("topology", [flat(2e-6, 450e9), nvlink(8)])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0, 2.5])
def test_a_collective_goes_on_while_its_ranks_compute(topology, part):
    alone = last_of(topology, 8, torch_all_reduce, FLOATS)
    gather = last_of(topology, 8, torch_all_gather, 8)
    found = VirtualCluster(8, topology).run(computes_meanwhile, part * alone)
    reduced = max(1.0, part) * alone
    assert found == [near((reduced, reduced + gather))] * 8
