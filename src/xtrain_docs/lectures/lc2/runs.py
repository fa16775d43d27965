"""Functions that run on every rank for the tables and figures of lc2."""

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING, TORCH
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.data_parallel.buckets import make_buckets

LAYERS, WIDTH = 6, 64


def deep_net(layers: int = LAYERS, width: int = WIDTH, bias: bool = True) -> nn.Module:
    """The network of all runs of lc2: linear layers with a tanh between them."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width, bias=bias), nn.Tanh()]
    return nn.Sequential(*modules)


def parameters_of_net(width: int = WIDTH) -> int:
    """Elements of the network's parameters."""
    return sum(p.numel() for p in deep_net(width=width).parameters())


def payload_of_step(micro_batches: int, no_sync: bool) -> dict[str, int]:
    """What one step of our DDP sends, with the ring underneath.

    Args:
        no_sync: all micro-batches but the last run inside `no_sync`.
    """
    model = DistributedDataParallel(deep_net(), collectives=RING)
    with CommLedger() as ledger:
        for number in range(micro_batches):
            waits = no_sync and number < micro_batches - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                model(torch.ones(2, WIDTH)).sum().backward()
    return {"sent": ledger.bytes_sent, "messages": ledger.messages}


def calls_of_step(wrapper: str, cap_kib: float) -> list[int]:
    """The payload of each collective of one step, in order.

    Args:
        wrapper: "naive", or "buckets" of `cap_kib` KiB.
    """
    net = deep_net()
    if wrapper == "naive":
        naive = NaiveDataParallel(net)
        with CommLedger() as ledger:
            naive(torch.ones(2, WIDTH)).sum().backward()
            naive.reduce_gradients()
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=cap_kib / 1024)
        with CommLedger() as ledger:
            model(torch.ones(2, WIDTH)).sum().backward()
    return [event.payload for event in ledger.events]


def backward_by_the_clock(layers: int, width: int, cap_mb: float) -> list[list[Any]]:
    """One backward as [what, number, seconds since its start], in order of time.

    What: "gradient" of a layer is complete, all gradients of a bucket are ("ready"),
    its all-reduce is "sent" or "done", backward has come to its "end".
    """
    seen: list[list[Any]] = []
    zero = 0.0
    buckets = iter(range(layers))

    def note(what: str, number: int) -> None:
        seen.append([what, number, time.perf_counter() - zero])

    def all_reduce(flat: torch.Tensor, group: Any = None) -> Any:
        number = next(buckets)
        note("sent", number)
        work = dist.all_reduce(flat, group=group, async_op=True)
        work.get_future().add_done_callback(lambda _: note("done", number))
        return work

    spy = replace(TORCH, name="clock", all_reduce=all_reduce)
    net = deep_net(layers, width, bias=False)
    parameters = list(net.parameters())
    packed = make_buckets(parameters, int(cap_mb * 2**20))  # as DDP will
    last_of = {bucket.parameters[-1]: n for n, bucket in enumerate(packed)}

    def gradient(parameter: nn.Parameter, number: int) -> None:
        note("gradient", number)
        if parameter in last_of:
            note("ready", last_of[parameter])

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(gradient, number=number))
    model = DistributedDataParallel(net, bucket_cap_mb=cap_mb, collectives=spy)
    for _ in range(3):  # connections and memory are warm at the third
        loss = model(torch.ones(256, width)).sum()
        dist.barrier()
        seen.clear()
        buckets, zero = iter(range(layers)), time.perf_counter()
        loss.backward()
        note("end", 0)
    return sorted(seen, key=lambda event: event[2])


def ddp_on_the_wire(kind: str, width: int) -> dict[str, Any]:
    """All-reduces and wire bytes of one step under a wrapper, connections warm.

    Args:
        kind: "ours" or "torch".
    """
    theirs = nn.parallel.DistributedDataParallel
    wrap: Any = DistributedDataParallel if kind == "ours" else theirs
    model = wrap(deep_net(width=width), bucket_cap_mb=1)
    x = torch.ones(2, width)
    for _ in range(3):  # torch's buckets are made anew after the first step
        model(x).sum().backward()
    dist.barrier()
    time.sleep(0.05)  # let the last bytes of the barrier leave
    with CommLedger() as ledger:
        model(x).sum().backward()
        time.sleep(0.05)
    calls = [event for event in ledger.events if event.kind == "collective"]
    return {
        "calls": len(calls),
        "payload": [event.payload for event in calls],
        "wire": ledger.wire_bytes,
    }
