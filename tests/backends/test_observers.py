"""Modes, fake tensors and the profiler see what they see on gloo."""

import operator
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backends.conftest import and_under_nccl_rules
from xtrain.backends import operators, shared_empty

# What the tests here prove, for their marks.
OBSERVED = (
    "xtrain.backends.operators:as_operator",
    "xtrain.backends.process_group:XtrainProcessGroup",
)

LARGE = 300_000


class Seen(TorchDispatchMode):
    """Counts operators by name, on their way down."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def every_collective() -> None:
    """torch's calls; what else is done here is the same on gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def parts() -> list[torch.Tensor]:
        return [torch.zeros(4) for _ in range(size)]

    x, whole = torch.ones(4), torch.ones(4 * size)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 4
    dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.reduce(x.fill_(1.0), 0)
    assert x[0] == (size if rank == 0 else 1)
    dist.all_gather(parts(), x)
    dist.gather(x, parts() if rank == 0 else None, 0)
    dist.scatter(x, [torch.ones(4)] * size if rank == 0 else None, 0)
    dist.group.WORLD._allgather_base(whole, x).wait()
    dist.all_to_all_single(whole, torch.ones(4 * size))
    dist.barrier()
    dist.group.WORLD.allreduce_coalesced([x, whole]).wait()
    assert x.tolist() == [size] * 4
    dist.all_reduce(torch.ones(LARGE), async_op=True).wait()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)


def under_modes() -> tuple[Counter, Counter, dict]:
    """What the outer of two modes, the inner one and CommDebugMode have seen."""
    with Seen() as outer, Seen() as inner:
        every_collective()
    with CommDebugMode() as counted:
        every_collective()
    counts = {str(name): n for name, n in counted.get_comm_counts().items()}
    return outer.names, inner.names, counts


def of_c10d(names: Counter) -> Counter:
    return Counter({name: n for name, n in names.items() if "c10d" in name})


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED, "xtrain.backends.observers:unobserved")
def test_a_dispatch_mode_sees_what_it_sees_on_gloo(ours, worlds_of):
    on_gloo = worlds_of("gloo").get(2).run(under_modes)
    for seen, expected in zip(ours(2).run(under_modes), on_gloo, strict=True):
        for names, gloos in zip(seen[:2], expected[:2], strict=True):
            assert of_c10d(names) == of_c10d(gloos)
            assert of_c10d(names).total() > 10
            # gloo makes some tensors in sight of the modes; ours makes no more.
            assert not names - gloos
        assert seen[2] == expected[2]


def without_clones() -> list[torch.Tensor]:
    """DDP in a mode that allows no clone: the step of a program that makes none."""

    class NoClone(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._overloadpacket == torch.ops.aten.clone:
                raise RuntimeError("clone encountered!")
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 10), find_unused_parameters=True)
    model._set_ddp_sink_clone(False)
    with NoClone():
        model(torch.full((10, 10), dist.get_rank() + 1.0)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED, "xtrain.backends.observers:unobserved")
def test_ddp_trains_in_a_mode_that_allows_no_clones(ours):
    size = 2
    for weight, bias in ours(size).run(without_clones):
        assert torch.equal(weight, torch.full((10, 10), 15.0))
        assert torch.equal(bias, torch.full((10,), 10.0))


def answered_by_a_mode() -> None:
    """A mode that does not go on to the collective: then nothing is sent."""

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.c10d.allreduce_.default:
                return args[0], dist.Work().boxed()
            return func(*args, **(kwargs or {}))

    if dist.get_rank() == 0:
        with Answers():
            work = dist.all_reduce(torch.ones(3), async_op=True)
        assert isinstance(work, dist.Work)
    total = torch.ones(3)
    dist.all_reduce(total)  # the first collective of both ranks
    assert total.tolist() == [2] * 3


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED)
def test_a_mode_may_answer_in_place_of_the_collective(ours):
    ours(2).run(answered_by_a_mode)


class Watched(dist.Work):
    """A work in place of another one."""

    def __init__(self, inner: dist.Work):
        super().__init__()
        self.inner, self.waits = inner, 0

    def wait(self, timeout=None) -> bool:
        self.waits += 1
        return self.inner.wait()


def replaced_by_a_mode() -> None:
    """A mode may return another work than it got: the caller waits for that one."""

    class Replaces(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.made = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.namespace != "c10d":
                return result
            boxed = result[-1] if isinstance(result, tuple) else result
            self.made.append(Watched(dist.Work.unbox(boxed)))
            boxed = self.made[-1].boxed()
            return (result[0], boxed) if isinstance(result, tuple) else boxed

    rank, tensor, total = dist.get_rank(), torch.zeros(3), torch.ones(3)

    def send() -> dist.Work:
        return dist.isend(torch.ones(3), 1 - rank)

    def receive() -> dist.Work:
        return dist.irecv(tensor, 1 - rank)

    with Replaces() as mode:
        # One of the two sends first: NCCL has one queue for both directions.
        first, second = (send, receive) if rank == 0 else (receive, send)
        works = [first(), second()]
        works.append(dist.all_reduce(total, async_op=True))
    for work in works:
        work.wait()
    assert [made.waits for made in mode.made] == [1, 1, 1]
    assert all(map(operator.is_, works, mode.made))
    assert tensor.tolist() == [1] * 3 and total.tolist() == [2] * 3


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED)
def test_a_mode_may_replace_the_work_of_a_call(ours):
    ours(2).run(replaced_by_a_mode)


def in_function_modes() -> None:
    """Where new tensors would have no memory, or could not be made at all."""

    class NoTensors(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    rank = dist.get_rank()
    for count in (4, LARGE):
        for mode in (torch.device("meta"), NoTensors()):
            tensor, whole = torch.ones(count), torch.zeros(2 * count)
            pieces = [torch.zeros(count), torch.zeros(count)]
            group = dist.group.WORLD
            with mode:
                group.allreduce([tensor]).wait()
                group.allgather([pieces], [tensor]).wait()
                group._reduce_scatter_base(tensor, whole).wait()
                group.barrier().wait()
                if rank == 0:
                    group.send([pieces[0]], 1, 0).wait()
                receive = group.recv([pieces[1 - rank]], 1 - rank, 0)
                if rank == 1:
                    group.send([pieces[1]], 0, 0).wait()
                receive.wait()
            assert pieces[0].eq(2).all() and tensor.eq(0).all()


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED, "xtrain.backends.observers:unobserved")
def test_function_modes_do_not_reach_inside(ours):
    ours(2).run(in_function_modes)


def fakes() -> None:
    """On one rank alone, so that nothing can have been sent."""
    if dist.get_rank() == 0:
        with FakeTensorMode() as mode:
            every_collective_of_fakes()
            real = torch.ones(2, device="cpu")
        every_collective_of_fakes(real)  # a fake tensor outside its mode
        with mode, pytest.raises(AssertionError, match="Please convert all Tensors"):
            dist.all_reduce(REAL)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


REAL = torch.ones(1)


def every_collective_of_fakes(x: torch.Tensor | None = None) -> None:
    x = torch.ones(2) if x is None else x
    size = dist.get_world_size()
    dist.all_reduce(x)
    assert dist.all_reduce(x, async_op=True).wait()
    (result,) = dist.all_reduce(x, async_op=True).get_future().wait()
    assert result is x
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([x] * size, x)
    dist.all_to_all_single(x, x)
    dist.reduce_scatter(x, [x] * size)
    dist.send(x, 1)
    dist.recv(x, 1)


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED)
def test_fake_tensors_are_traced_and_nothing_is_sent(ours):
    ours(2).run(fakes)


def profiled() -> list[tuple[str, list]]:
    with profile(record_shapes=True) as profiler:
        every_collective()
        shape = [3, 5]
        dist.all_reduce(torch.ones(shape))
    total = torch.ones(1)
    dist.all_reduce(total)  # unseen
    assert total.item() == dist.get_world_size()
    return [(event.name, event.input_shapes) for event in profiler.events()]


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED, "xtrain.backends.observers:unobserved")
def test_the_profiler_shows_collectives_as_on_gloo(ours, backend, worlds_of):
    on_gloo = worlds_of("gloo").get(2).run(profiled)
    for events, expected in zip(ours(2).run(profiled), on_gloo, strict=True):
        names = Counter(name for name, _ in events)
        gloos = Counter(name for name, _ in expected)
        assert {n for n in names if n.startswith("c10d::")} == {
            n for n in gloos if n.startswith("c10d::")
        }
        own = {n.partition(":")[2] for n in names if n.startswith(f"{backend}:")}
        assert own == {n.partition(":")[2] for n in gloos if n.startswith("gloo:")}
        assert (f"{backend}:all_reduce", [[3, 5]]) in events
        # What the program itself does: no copies, clones and views of ours.
        assert not {n for n in names if n.startswith("aten::")} - {
            n for n in gloos if n.startswith("aten::")
        }


def shared_under_a_mode() -> None:
    with Seen() as seen:
        tensor = shared_empty(LARGE).fill_(1.0)
        dist.all_reduce(tensor)
    assert tensor[0].item() == 2
    assert {name for name in seen.names if "c10d" in name} == {
        "c10d.allreduce_.default"
    }


@pytest.mark.verifies(*OBSERVED, "xtrain.backends.observers:unobserved")
def test_shared_tensors_under_a_mode(worlds_of):
    worlds_of("xtrain-shm").get(2).run(shared_under_a_mode)


def nothing_is_asked_twice() -> int:
    """With no mode and no profiler, no call passes the dispatcher."""

    def never(*args):
        raise AssertionError("through the dispatcher")

    operators._dispatched, kept = never, operators._dispatched
    every_collective()
    operators._dispatched = kept


@and_under_nccl_rules
@pytest.mark.verifies(*OBSERVED)
def test_unobserved_calls_take_the_direct_way(ours):
    ours(2).run(nothing_is_asked_twice)


def waited_for_under_a_mode(path: str, length: int) -> Counter:
    """Rank 1 comes late, so that rank 0 does its part of the sum in `wait`."""
    tensor, store = torch.ones(length), dist.FileStore(path, 2)
    if dist.get_rank() == 1:
        store.wait([str(length)])
    with Seen() as seen:
        work = dist.all_reduce(tensor, async_op=True)
        store.set(str(length), "posted")
        work.wait()
    assert bool((tensor == 2).all())
    return seen.names


@and_under_nccl_rules
def test_a_mode_sees_no_operation_of_a_wait(ours, tmp_path):
    path = str(tmp_path / "store")
    for length in (10, 300_000):
        for names in ours(2).run(waited_for_under_a_mode, path, length):
            assert [name for name in names if name.startswith("aten")] == []
            assert any("allreduce" in name for name in names)
