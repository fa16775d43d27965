"""The pretended device: computes what the CPU does, and mixes with nothing of it."""

import io
import os
import shutil
import sys
import threading
from contextvars import ContextVar
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from xtrain.testing import World
from xtrain.testing.backend_choice import Machine, choose
from xtrain.testing.pretended_device import host_view

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which(os.environ.get("CXX", "g++")),
    reason="the pretended device is compiled with g++",
)
HERE, CPU = "xgpu", "cpu"
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    # Like most sessions, this one has run a backward pass before it forks its ranks.
    torch.ones(1, requires_grad=True).sum().backward()
    with World(2, "xtrain-shm", HERE) as world:
        yield world


def numbers(*shape, seed=0, device=None):
    generator = torch.Generator(CPU).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CPU).to(device)


def attention(device):
    x = numbers(2, 3, 7, 8, device=device)
    mask = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    return [
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
    ]


def in_place(device):
    x = numbers(4, 6, device=device)
    x.t()[1:3].mul_(2)
    x[torch.tensor([0, 2], device=device), 1] = 5.0
    x[:, torch.tensor([3], device=CPU)] = 7.0  # as on a GPU, indices may be the CPU's
    x.index_add_(0, torch.tensor([1, 1], device=device), numbers(2, 6, device=device))
    x.scatter_(1, torch.tensor([[0], [5]], device=device), 9.0)
    x[x > 8] = 0
    return [x, x.view(2, 12), x.unfold(1, 2, 2).contiguous()]


def out(device):
    x, result = numbers(5, device=device), torch.empty(0, device=device)
    torch.add(x, 1, out=result)
    values = torch.empty(0, device=device)
    places = torch.empty(0, dtype=torch.int64, device=device)
    torch.topk(x, 2, out=(values, places))
    part = torch.zeros(10, device=device)
    torch.mul(x, 2, out=part[::2])
    return [result, values, places, part]


def selections(device):
    x = numbers(6, 8, device=device)
    return [
        *x.sort(1), *x.topk(3), x.argmax(1), x.cumsum(1), x.nonzero(),
        torch.bmm(x.view(2, 3, 8), x.view(2, 8, 3)), torch.cat([x, x[:1]]),
        torch.where(x > 0, x, torch.tensor(0.0, device=CPU)), x.masked_select(x > 1),
        torch.einsum("ij,kj->ik", x, x), *x.split([2, 4]), *x.unbind(1),
    ]  # fmt: skip


def every_dtype(device):
    x = (numbers(9, device=CPU) * 4).to(device)
    results = [(x.to(dtype) * x.to(dtype)).sum() for dtype in DTYPES]
    results += [x.to(d).float() for d in (torch.float8_e4m3fn, torch.float8_e5m2)]
    z = torch.view_as_complex(x[:8].view(4, 2))
    return [*results, z.conj() + 1, z.imag, torch.view_as_real(z.conj().resolve_conj())]


def seeded(device):
    torch.manual_seed(5)
    results = [torch.randn(4, device=device), torch.randperm(9, device=device)]
    results += [F.dropout(torch.ones(20, device=device)), torch.rand(3, device=device)]
    generator = torch.Generator(device).manual_seed(7)
    nn.init.normal_(x := torch.empty(5, device=device), generator=generator)
    return [*results, x, torch.randint(9, (4,), generator=generator, device=device)]


def resized(device):
    x = numbers(6, device=device)
    kept, storage = x.clone(), x.untyped_storage()
    storage.resize_(0)
    assert (storage.nbytes(), x.data_ptr()) == (0, 0)
    storage.resize_(kept.nbytes)
    x.copy_(kept)
    y = numbers(3, device=device).resize_(5).fill_(2)
    z = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2, 2), (2, 1))
    z.add_(1)
    return [x, y, z]


def saved(device):
    file = io.BytesIO()
    torch.save({"x": numbers(3, device=device)}, file)
    file.seek(0)
    there = torch.load(file, weights_only=True)["x"]
    file.seek(0)
    here = torch.load(file, map_location=CPU, weights_only=True)["x"]
    assert (there.device.type, here.device.type) == (device, CPU)
    return [there, here]


def model(device):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(11, 16, device=device),
        nn.LayerNorm(16, device=device),
        nn.Linear(16, 16, device=device),
        nn.GELU(),
        nn.Linear(16, 11, device=device),
    )


def trained(optimizer, device):
    net = model(CPU).to(device)
    steps = optimizer(net.parameters())
    ids, losses = torch.arange(20, device=device).view(4, 5) % 11, []
    for _ in range(3):
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        losses.append(loss.detach())
        steps.step()
        steps.zero_grad()
    return [*losses, *(p.detach() for p in net.parameters())]


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, foreach=False),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}
CASES = {
    "attention": attention, "in place": in_place, "out": out, "seeded": seeded,
    "selections": selections, "every dtype": every_dtype, "resized": resized,
    "saved": saved,
    **{name: partial(trained, optimizer) for name, optimizer in OPTIMIZERS.items()},
}  # fmt: skip


def compare(case):
    expected, results = CASES[case](CPU), CASES[case](HERE)
    for index, (mine, cpu) in enumerate(zip(results, expected, strict=True)):
        if not (case == "saved" and index):
            assert mine.device == torch.device(HERE, dist.get_rank()), mine.device
        assert mine.dtype is cpu.dtype and mine.stride() == cpu.stride()
        torch.testing.assert_close(mine.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_the_cpus(ranks, case):
    ranks.run(compare, case)


def mixtures():
    here, there = torch.ones(3), torch.ones(3, device=CPU)
    ids = torch.tensor([0, 1], device=CPU)
    other = torch.ones(3, device=torch.device(HERE, 5))
    generator = torch.Generator(CPU)
    both = "Expected all tensors to be on the same device"
    yield both, lambda: here + there
    yield both, lambda: there.mul_(here)
    yield both, lambda: there + here.sum()
    yield both, lambda: torch.add(here, here, out=torch.empty(3, device=CPU))
    yield both, lambda: torch.tensor(1.0, device=CPU).add_(here.sum())
    yield both, lambda: here + other
    yield both, lambda: torch.cat([here, there])
    yield both, lambda: F.embedding(ids, torch.ones(3, 3))
    yield both, lambda: here.index_select(0, ids)
    yield both, lambda: F.linear(there, torch.ones(2, 3))
    yield both, lambda: torch._foreach_add([here], [there])
    yield both, lambda: there[torch.tensor([0])]
    yield "generator", lambda: torch.randn(3, generator=generator)
    yield "generator", lambda: here.normal_(generator=generator)
    yield "can't convert xgpu:. device type tensor to numpy", here.numpy


def refuse_mixtures():
    for message, call in mixtures():
        with pytest.raises((RuntimeError, TypeError), match=message):
            call()
    # What a GPU takes, too: a number from the CPU, and copies.
    x = torch.ones(3)
    assert (x + torch.tensor(2.0, device=CPU)).tolist() == [3, 3, 3]
    assert x.copy_(torch.arange(3.0, device=CPU)).cpu().tolist() == [0, 1, 2]
    assert torch.zeros(3, device=CPU).copy_(x).tolist() == [0, 1, 2]
    assert x.sum().item() == 3 and x.device == torch.device(HERE, dist.get_rank())


def test_tensors_and_generators_do_not_mix_with_the_cpus(ranks):
    ranks.run(refuse_mixtures)


SETTING: ContextVar[str] = ContextVar("SETTING", default="default")


class Look(torch.autograd.Function):
    """Its backward notes where it runs."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        main = threading.current_thread() is threading.main_thread()
        ctx.notes += [main, SETTING.get(), torch.accelerator.current_device_index()]
        return gradient * 2, None


def backward_thread(device):
    SETTING.set("mine")
    notes = []
    x = torch.ones(3, device=device, requires_grad=True)
    Look.apply(x, notes).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    return notes


def test_backward_runs_on_a_thread_of_the_device(ranks):
    found = ranks.run(backward_thread, HERE)
    assert found == [[False, "default", rank] for rank in range(2)]
    found = ranks.run(backward_thread, CPU)
    assert found == [[True, "mine", rank] for rank in range(2)]


def autocast():
    net, ids = model(HERE), torch.arange(4)
    with torch.autocast(HERE, dtype=torch.bfloat16):
        y = net(ids)
        assert y.dtype is torch.bfloat16 and (y @ y.t()).dtype is torch.bfloat16
        assert F.cross_entropy(y, ids).dtype is torch.float32
        assert y.softmax(1).dtype is y.sum().dtype is torch.float32
        assert F.layer_norm(y, y.shape[1:]).dtype is torch.float32
        assert torch.addcmul(y, y, y.float()).dtype is torch.float32
        with torch.autocast(HERE, enabled=False):
            assert net(ids).dtype is torch.float32
    with torch.autocast(CPU, dtype=torch.bfloat16):
        assert net(ids).dtype is torch.float32
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in net.parameters())


def test_autocast_of_the_device_and_not_of_the_cpu(ranks):
    ranks.run(autocast)


def views():
    x = torch.arange(6.0)
    host = host_view(x.view(2, 3)[:, 1:])
    assert host.device.type == CPU and host.tolist() == [[1, 2], [4, 5]]
    host.fill_(9)
    assert x.tolist() == [0, 9, 9, 3, 9, 9]
    x.zero_()
    assert host.sum() == 0 and host_view(x).data_ptr() == x.data_ptr()
    del x
    assert host.tolist() == [[0, 0], [0, 0]]  # the memory lives as long as the view


def test_memory_is_the_cpus(ranks):
    ranks.run(views)


def communicate():
    rank, one = dist.get_rank(), torch.ones(2)
    dist.all_reduce(x := one * (rank + 1))
    whole = torch.empty(4)
    dist.all_gather_into_tensor(whole, x + rank)
    turned = torch.ones(2, 3).t() * (rank + 1)  # not contiguous
    if dist.get_backend() == "nccl-rules":
        turned = turned.contiguous()
    dist.broadcast(turned, 1)
    messages = [
        dist.P2POp(dist.isend, x, 1 - rank),
        dist.P2POp(dist.irecv, one, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    found = [None, None]
    dist.all_gather_object(found, rank)
    with pytest.raises(ValueError, match="serves dense xgpu tensors, got .* on cpu"):
        dist.all_reduce(torch.ones(1, device=CPU))
    return x, whole, turned, one, found


@pytest.mark.parametrize("backend", ["xtrain-shm", "xtrain-socket", "nccl-rules"])
def test_a_group_takes_the_tensors_of_the_device_alone(backend):
    with World(2, backend, HERE) as world:
        results = world.run(communicate)
    for x, whole, turned, one, found in results:
        assert x.is_cpu and x.tolist() == [3, 3] and one.tolist() == [3, 3]
        assert whole.tolist() == [3, 3, 4, 4] and turned.tolist() == [[2, 2]] * 3
        assert found == [0, 1]


def random_state():
    torch.manual_seed(1)
    cpu, here = torch.get_rng_state(), torch.xgpu.get_rng_state()
    first = torch.rand(3)
    assert torch.equal(cpu, torch.get_rng_state())  # the CPU's is another
    torch.xgpu.set_rng_state(here)
    assert torch.equal(first, torch.rand(3))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3))
    F.dropout(torch.ones(3))
    assert torch.equal(cpu, torch.get_rng_state())


def test_random_numbers_leave_the_cpus_generator_alone(ranks):
    ranks.run(random_state)


def accelerator():
    return str(torch.accelerator.current_accelerator())


def test_it_is_there_only_where_it_was_asked_for(ranks):
    assert ranks.run(accelerator) == [HERE, HERE]
    assert torch._C._get_privateuse1_backend_name() != HERE
    with World(1) as world:
        assert world.run(accelerator) != [HERE]


def test_backends_that_do_not_take_it_are_refused():
    assert choose(None, HERE, Machine()).backend == "nccl-rules"
    with pytest.raises(ValueError, match="gloo does not take tensors of xgpu"):
        choose("gloo", HERE, Machine())
    with pytest.raises(ValueError, match="nccl moves GPU memory only"):
        choose("nccl", HERE, Machine())
