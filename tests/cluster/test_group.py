"""torch's interface on a virtual cluster: each result is what one process computes."""

import copy
import functools
import math
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from xtrain.cluster import VirtualCluster, advance, flat, now, running, table
from xtrain.cluster.per_rank import replaced
from xtrain.data_parallel import DistributedDataParallel
from xtrain.tensor_parallel import ParallelSwiGLU
from xtrain.zero import Adam, FullyShardedDataParallel, ZeroOptimizer

GROUP = "xtrain.cluster.group:VirtualGroup"
MOVES = "xtrain.cluster.moves:Moves"
RUN = "xtrain.cluster.virtual_cluster:VirtualCluster"
SIZES = 1, 2, 3, 4, 8
DTYPES = torch.float64, torch.bfloat16, torch.int32


def numbers(rank: int, count: int, dtype=torch.float64) -> Tensor:
    """Small whole numbers, exact in any dtype."""
    return ((torch.arange(count) * (rank + 3) + rank) % 5 + 1).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, -tensor], dim=-1)[..., 0]


def ended(work, asynchronous: bool) -> None:
    if asynchronous:
        work.wait()
    else:
        assert work is None


def reductions(dtype, put, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    every = torch.stack([numbers(r, 2 * size, dtype) for r in range(size)])
    found, right = [], []
    ops = {dist.ReduceOp.SUM: every.sum(0), dist.ReduceOp.MAX: every.amax(0)}
    if dtype == torch.float64:
        ops[dist.ReduceOp.AVG] = every.mean(0)
        ops[dist.ReduceOp.PRODUCT] = every.prod(0)
    for op, total in ops.items():
        mine = put(every[rank].clone())
        ended(dist.all_reduce(mine, op, async_op=asynchronous), asynchronous)
        part, pieces = put(mine[:2].clone()), [put(p) for p in every[rank].split(2)]
        ended(
            dist.reduce_scatter(part, pieces, op, async_op=asynchronous), asynchronous
        )
        half = put(mine[:2].clone())
        whole = put(every[rank].clone())
        work = dist.reduce_scatter_tensor(half, whole, op, async_op=asynchronous)
        ended(work, asynchronous)
        rooted, root = put(every[rank].clone()), size - 1
        ended(dist.reduce(rooted, root, op, async_op=asynchronous), asynchronous)
        share = total[2 * rank : 2 * rank + 2]
        found += [mine, part, half] + [rooted] * (rank == root)
        right += [total, share, share] + [total] * (rank == root)
    return found, [each.to(dtype) for each in right]


def copies(dtype, put, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    root, wait = size // 2, partial(ended, asynchronous=asynchronous)
    given = put(numbers(rank, 5, dtype))
    sent = given.clone() if rank == root else put(torch.zeros_like(given))
    wait(dist.broadcast(sent, root, async_op=asynchronous))
    uneven = [put(torch.zeros(r + 1, dtype=dtype)) for r in range(size)]
    wait(dist.all_gather(uneven, put(numbers(rank, rank + 1, dtype)),
                         async_op=asynchronous))  # fmt: skip
    even = [put(torch.zeros(5, dtype=dtype)) for _ in range(size)]
    wait(dist.all_gather(even, given, async_op=asynchronous))
    whole = put(torch.zeros(5 * size, dtype=dtype))
    wait(dist.all_gather_into_tensor(whole, given, async_op=asynchronous))
    at_root = [torch.zeros_like(given) for _ in range(size)] if rank == root else None
    wait(dist.gather(given, at_root, root, async_op=asynchronous))
    part = put(torch.zeros(5, dtype=dtype))
    parts = [numbers(r + 7, 5, dtype) for r in range(size)] if rank == root else None
    wait(dist.scatter(part, parts, root, async_op=asynchronous))
    # rank r sends s + 1 elements to rank s
    rows = [put(numbers(10 * rank + s, s + 1, dtype)) for s in range(size)]
    taken = [put(torch.zeros(rank + 1, dtype=dtype)) for _ in range(size)]
    wait(dist.all_to_all(taken, rows, async_op=asynchronous))
    flat = put(torch.zeros(size * (rank + 1), 2, dtype=dtype))
    table = put(torch.cat(rows)[:, None].repeat(1, 2))
    split = [s + 1 for s in range(size)]
    wait(dist.all_to_all_single(
        flat, table, [rank + 1] * size, split, async_op=asynchronous
    ))  # fmt: skip
    wait(dist.barrier(async_op=asynchronous))
    all_given = [numbers(r, 5, dtype) for r in range(size)]
    arrived = [numbers(10 * r + rank, rank + 1, dtype) for r in range(size)]
    found = [*uneven, sent, *even, whole, *(at_root or []), part, *taken, flat]
    right = [numbers(r, r + 1, dtype) for r in range(size)]
    right += [numbers(root, 5, dtype), *all_given, torch.cat(all_given)]
    right += [*(all_given if at_root else []), numbers(rank + 7, 5, dtype), *arrived]
    right.append(torch.cat(arrived)[:, None].repeat(1, 2))
    return found, right


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.verifies(GROUP, MOVES, RUN, "xtrain.cluster.moves:all_to_all")
@pytest.mark.verifies("xtrain.cluster.collectives:CollectiveCalls")
def test_collectives_give_what_one_process_computes(size):
    for dtype in DTYPES:
        for put in (Tensor.clone, strided):
            for asynchronous in (False, True):
                for calls in (reductions, copies):
                    run = VirtualCluster(size).run(calls, dtype, put, asynchronous)
                    for found, right in run:
                        assert len(found) == len(right)
                        for mine, expected in zip(found, right, strict=True):
                            assert torch.equal(mine, expected), (calls, dtype)


# -- messages


def exchanged(size):
    """What arrives by each way of sending; right if it names sender and number."""
    rank, right, left = dist.get_rank(), *neighbours()
    sent = [torch.full((2, 3), 10.0 * rank + k).t() for k in range(3)]  # strided
    taken = [torch.zeros(3, 2) for _ in range(3)]
    works = [dist.irecv(t, left, tag=k) for k, t in reversed([*enumerate(taken)])]
    works += [dist.isend(t.contiguous(), right, tag=k) for k, t in enumerate(sent)]
    for work in works:
        work.wait()
    batched = torch.zeros(3, 2)
    calls = [dist.P2POp(dist.isend, sent[2].contiguous(), right)]
    calls.append(dist.P2POp(dist.irecv, batched, left))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    blocking = torch.zeros(1, dtype=torch.int32)
    if rank == 0:
        dist.send(blocking + 7, right)
        source = dist.recv(blocking, left)
    else:
        source = dist.recv(blocking, left)
        dist.send(blocking + 1, right)
    assert source == left
    expected = [10.0 * left + k for k in range(3)]
    assert [t.unique().item() for t in taken] == expected
    assert batched.unique().item() == expected[2]
    return blocking.item()


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def moment(rank):
    return float(3 * rank % 8)


def from_anyone(waited):
    """On rank 0 who sent what, in the order of arrival."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        advance(moment(rank))
        dist.send(torch.tensor([rank]), 0)
        return None
    advance(waited)
    number, found = torch.zeros(1, dtype=torch.int64), []
    for _ in range(size - 1):
        found.append((dist.recv(number), number.item()))
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.verifies(GROUP, "xtrain.cluster.messages:Mailbox")
@pytest.mark.verifies("xtrain.cluster.messages:PostedMessage")
def test_messages_arrive_by_source_tag_and_order(size):
    found = VirtualCluster(size).run(exchanged, size)
    assert found == [7 + (size - 1)] + [7 + rank - 1 for rank in range(1, size)]
    for waited in (0.0, 9.0):  # while they come, or when all are there
        first, *_ = VirtualCluster(size).run(from_anyone, waited)
        order = sorted(range(1, size), key=moment)
        assert first == [(rank, rank) for rank in order]


# -- what is built on them


def functional():
    """Functional collectives, with gradients where torch has them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    x = torch.arange(2.0 * size, dtype=torch.float64) + rank
    every = torch.stack([x - rank + r for r in range(size)])
    assert torch.equal(funcol.all_reduce(x, "sum", world), every.sum(0))
    assert torch.equal(funcol.all_gather_tensor(x, 0, world), every.flatten())
    share = every.sum(0)[2 * rank : 2 * rank + 2]
    assert torch.equal(funcol.reduce_scatter_tensor(x, "sum", 0, world), share)
    turned = every.view(size, size, 2)[:, rank].flatten()
    assert torch.equal(funcol.all_to_all_single(x, None, None, world), turned)
    a, b = funcol.all_gather_into_tensor_coalesced([x, x * 2], world)
    assert torch.equal(torch.cat([a, b]), torch.cat([every, every * 2]).flatten())
    source = x.clone().requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(source, 0, world)
    (gathered * gathered.detach()).sum().backward()
    assert torch.allclose(source.grad, size * x)
    source = x.clone().requires_grad_()
    (dist.nn.functional.all_reduce(source) ** 2).sum().backward()
    assert torch.allclose(source.grad, 2 * size * every.sum(0))


def coalesced_and_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    one, two = torch.ones(2), torch.full((3,), float(rank))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(one)
        dist.all_reduce(two)
    manager.wait()
    assert one.tolist() == [size] * 2
    assert two.tolist() == [sum(range(size))] * 3
    lists = [None] * size
    dist.all_gather_object(lists, {"rank": rank, "text": "x" * rank})
    assert lists == [{"rank": r, "text": "x" * r} for r in range(size)]
    got = [rank] * 2
    dist.broadcast_object_list(got, size - 1)
    assert got == [size - 1] * 2
    mine = [None]
    dist.scatter_object_list(mine, list("abcdefgh")[:size] if rank == 0 else None, 0)
    assert mine == ["abcdefgh"[rank]]
    at_root = [None] * size if rank == 0 else None
    dist.gather_object(rank, at_root, 0)
    assert at_root == (list(range(size)) if rank == 0 else None)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.verifies(GROUP, "xtrain.cluster.works:VirtualWork")
def test_functional_coalesced_and_object_collectives(size):
    VirtualCluster(size).run(functional)
    VirtualCluster(size).run(coalesced_and_objects)


def groups_and_meshes():
    """Sums over groups of many kinds, each of which says who is in it."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
    found = {}
    for axis in ("data", "tensor"):
        found[axis] = sum_over(mesh[axis].get_group())
    found["both"] = sum_over(mesh._flatten("both").get_group())
    found["backwards"] = [
        sum_over(dist.new_group([5, 2], use_local_synchronization=True))
        if rank in (2, 5) else None
    ]  # fmt: skip
    own, _ = dist.new_subgroups(group_size=2)
    found["pairs"] = sum_over(own)
    overlapping = [dist.new_group(list(range(first, first + 3))) for first in range(6)]
    found["three"] = [sum_over(g) for g in overlapping if g is not NON_MEMBER]
    dist.destroy_process_group(own)
    with pytest.raises(ValueError, match="group"):
        dist.all_reduce(torch.ones(1), group=own)
    return found


NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def sum_over(group):
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


def again_and_again():
    """A program that ends its groups and begins anew, as after a failure."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for number in range(3):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group(
            "xtrain-virtual", store=store_of_the_cluster(number), rank=rank,
            world_size=size,
        )  # fmt: skip
        found.append(sum_over(None))
    return found


def in_halves():
    """Even and odd ranks end the group of all, and are two jobs from then on."""
    job, rank = dist.get_rank() % 2, dist.get_rank() // 2
    dist.destroy_process_group()
    dist.init_process_group(
        "xtrain-virtual", store=store_of_the_cluster(f"job {job}"), rank=rank,
        world_size=2,
    )  # fmt: skip
    pair, total = dist.new_group([0, 1]), torch.tensor([10.0 ** (2 * rank + job)])
    dist.all_reduce(total, group=pair)
    taken = torch.zeros(1)
    if rank == 0:
        dist.send(total, 1)
    else:
        dist.recv(taken, 0)
    return int(total), int(taken)


def store_of_the_cluster(number):
    return dist.PrefixStore(f"again {number}", running.cluster().store)


@pytest.mark.verifies(GROUP, "xtrain.cluster.group:Members")
@pytest.mark.verifies("xtrain.cluster.store:VirtualStore")
def test_groups_and_meshes_hold_their_ranks_alone():
    for rank, found in enumerate(VirtualCluster(8).run(groups_and_meshes)):
        row, column = divmod(rank, 4)
        assert found["data"] == 2**column + 2 ** (column + 4)
        assert found["tensor"] == 0b1111 << 4 * row
        assert found["both"] == 0b11111111
        assert found["backwards"] == ([36] if rank in (2, 5) else [None])
        assert found["pairs"] == 0b11 << (rank // 2 * 2)
        firsts = range(max(0, rank - 2), min(5, rank) + 1)
        assert found["three"] == [0b111 << first for first in firsts]
    assert VirtualCluster(4).run(again_and_again) == [[15, 15, 15]] * 4
    assert VirtualCluster(4).run(in_halves) == [
        (101, 0), (1010, 0), (101, 101), (1010, 1010)
    ]  # fmt: skip


# -- training: each as one process


WIDTH, BATCH, STEPS = 8, 8, 3


def model_of(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)).double()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def train(model, optimizer, part=slice(None), after=lambda: None):
    for step in range(STEPS):
        model(batch_of(step)[part]).square().mean().backward()
        after()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def one_process():
    model = model_of()
    train(model, torch.optim.Adam(model.parameters(), lr=0.1))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def own_part():
    rows = BATCH // dist.get_world_size()
    return slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)


def with_torchs_ddp(hook):
    model = model_of(seed=dist.get_rank())
    ddp = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=1e-3, find_unused_parameters=hook == "unused",
        gradient_as_bucket_view=hook == "view", static_graph=hook == "static",
    )  # fmt: skip
    if hook == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if hook == "python":
        ddp.register_comm_hook(None, averaged_in_python)
    train(ddp, torch.optim.Adam(ddp.parameters(), lr=0.1), own_part())
    return model.parameters()


def averaged_in_python(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())


class Computes(torch.autograd.Function):
    """A millisecond in backward."""

    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        advance(1e-3)
        return grad


def seconds_of_torchs_ddp():
    """Of its second step: four layers, a bucket each."""
    layers = [nn.Linear(500, 500, bias=False) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=0.5
    )
    input = torch.ones(2, 500, requires_grad=True)
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: Computes.apply(*args))
    for _ in range(2):
        model.zero_grad()
        start = now()
        model(input).sum().backward()
    return now() - start


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.verifies("xtrain.cluster.works:VirtualWork")
def test_torchs_ddp_reduces_while_backward_goes_on(contended):
    links = {(0, 1): (1e-6, 1e9), (1, 2): (1e-6, 1e9), (2, 0): (1e-6, 1e9)}
    topology = table(3, links) if contended else flat(1e-6, 1e9)
    seconds = VirtualCluster(3, topology).run(seconds_of_torchs_ddp)
    # four buckets, a millisecond each by two trees, beside four of backward: the first
    # bucket begins before the first of them, the last one behind the third
    assert max(seconds) == pytest.approx(4e-3, rel=0.01)


def with_fsdp2(reshard):
    model = model_of()
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), own_part())
    return [p.full_tensor() for p in model.parameters()]


def with_dtensor(_):
    """Two layers cut by torch's tensor parallelism, gradients of the rest summed."""
    model, mesh = model_of(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )  # fmt: skip
    train(model, torch.optim.Adam(model.parameters(), lr=0.1, foreach=False))
    return [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]


def with_our_ddp(_):
    model = model_of(seed=dist.get_rank())
    ddp = DistributedDataParallel(model)
    train(ddp, torch.optim.Adam(ddp.parameters(), lr=0.1), own_part())
    return model.parameters()


def with_our_zero(stage):
    model = model_of()
    optimizer = ZeroOptimizer(model.parameters(), Adam, stage, lr=0.1)
    train(model, optimizer, own_part())
    return model.parameters()


def with_our_fsdp(_):
    model = FullyShardedDataParallel(model_of())
    train(model, Adam(model.parameters(), lr=0.1), own_part())
    return model.full_state_dict().values()


PROGRAMS = [
    *((with_torchs_ddp, how) for how in ("plain", "view", "unused", "static")),
    *((with_torchs_ddp, how) for how in ("hook", "python")),
    (with_fsdp2, True), (with_fsdp2, False), (with_dtensor, None),
    (with_our_ddp, None), (with_our_zero, 1), (with_our_zero, 2), (with_our_fsdp, None),
]  # fmt: skip


def difference(program, how):
    values = torch.cat([p.detach().flatten() for p in program(how)])
    return (values - one_process()).abs().max().item()


@pytest.mark.parametrize(("program", "how"), PROGRAMS)
@pytest.mark.verifies(GROUP, RUN, "xtrain.cluster.works:VirtualCall")
def test_training_gives_the_parameters_of_one_process(program, how):
    for size in (1, 2, 4):
        assert max(VirtualCluster(size).run(difference, program, how)) < 1e-10


def tensor_parallel():
    """Ours: a feed-forward block cut over all ranks, against the whole block."""
    torch.manual_seed(0)
    whole = [torch.randn(*s, dtype=torch.float64) for s in ((16, 8), (16, 8), (8, 16))]
    block = ParallelSwiGLU(8, 16).double()
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [whole[0].chunk(size)[rank], whole[1].chunk(size)[rank]]
    parts.append(whole[2].chunk(size, dim=1)[rank])
    with torch.no_grad():
        for parameter, value in zip(block.parameters(), parts, strict=True):
            parameter.copy_(value)
    x = batch_of(0)
    first, second, last = whole
    right = (nn.functional.silu(x @ first.T) * (x @ second.T)) @ last.T
    return (block(x) - right).abs().max().item()


def staged(schedule):
    """torch's own pipeline: one stage a rank; the loss and gradients of the whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = [model_of(seed)[:3] for seed in range(size)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    x = batch_of(0)
    whole(x).square().mean().backward()
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    runner = schedule(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    targets = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    if rank == 0:
        runner.step(x)
    else:
        runner.step(target=targets) if rank == size - 1 else runner.step()
    pairs = zip(layers[rank].parameters(), whole[rank].parameters(), strict=True)
    return max((mine.grad - right.grad).abs().max().item() for mine, right in pairs)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.verifies(GROUP, MOVES)
def test_cut_layers_and_torchs_pipelines_equal_the_whole_model(size):
    assert max(VirtualCluster(size).run(tensor_parallel)) < 1e-12
    for schedule in (ScheduleGPipe, Schedule1F1B):
        assert max(VirtualCluster(size).run(staged, schedule)) < 1e-12


# -- what belongs to a rank


def replaced_by_rank():
    """Each rank replaces a function while the others run, and has its own."""
    rank, before = dist.get_rank(), math.factorial
    with replaced(math, "factorial", lambda n: (rank, n)):
        dist.barrier()
        inside = math.factorial(3)
        dist.barrier()
    dist.barrier()
    return inside, math.factorial is before


@pytest.mark.verifies("xtrain.cluster.per_rank:replaced")
@pytest.mark.verifies("xtrain.cluster.per_rank:RankState")
def test_what_a_rank_replaces_is_its_own():
    found = VirtualCluster(4).run(replaced_by_rank)
    assert found == [((rank, 3), True) for rank in range(4)]
    assert math.factorial(3) == 6


def late_key():
    """Rank 0 waits for a key for one virtual second; rank 1 sets it after two."""
    store = running.cluster().store
    if dist.get_rank() == 1:
        advance(2.0)
        store.set("late", "value")
        return now()
    with pytest.raises(RuntimeError, match="timeout, keys: late"):
        store.wait(["late"], timedelta(seconds=1))
    before = now()
    return before, store.get("late"), now()


@pytest.mark.verifies("xtrain.cluster.store:VirtualStore")
def test_a_store_waits_in_virtual_time():
    assert VirtualCluster(2).run(late_key) == [(1.0, b"value", 2.0), 2.0]
