"""Backward and its buckets by the clock, and how large buckets are."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.collective_choice import TORCH
from xtrain.data_parallel import DistributedDataParallel
from xtrain.data_parallel.buckets import make_buckets

from ... import runs
from ...amounts import seconds
from ...figures import REGISTRY
from ...svg import TimeAxis, document, line, text
from ...values import value
from .boxes import WIDTH

LEFT, ROW = 62, 28


@value
def bucket_bytes(cap_kib: float) -> list[int]:
    """Bytes of the buckets of 6 linear layers of 64 x 64; 0 KiB: one a parameter."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    packed = make_buckets(list(net.parameters()), int(cap_kib * 2**10))
    return [4 * bucket.flat.numel() for bucket in packed]


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

    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    parameters = list(net.parameters())
    packed = make_buckets(parameters, int(cap_mb * 2**20))  # as DDP will
    last_of = {bucket.parameters[-1]: n for n, bucket in enumerate(packed)}

    def gradient(parameter: nn.Parameter, number: int) -> None:
        note("gradient", number)
        if parameter in last_of:
            note("ready", last_of[parameter])

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(gradient, number=number))
    spy = replace(TORCH, all_reduce=all_reduce)
    model = DistributedDataParallel(net, bucket_cap_mb=cap_mb, collectives=spy)
    for _ in range(3):  # connections and memory are warm at the third
        loss = model(torch.ones(256, width)).sum()
        dist.barrier()
        seen.clear()
        buckets, zero = iter(range(layers)), time.perf_counter()
        loss.backward()
        note("end", 0)
    return sorted(seen, key=lambda event: event[2])


@REGISTRY
def ddp_overlap() -> str:
    """Backward and its buckets by rank 0's clock."""
    return overlap_chart(runs.remembered(backward_by_the_clock, 2, 8, 512, 2.0)[0])


def overlap_chart(events: list[list[Any]]) -> str:
    """A row for backward, and one a bucket: a dot when it is full, a bar to its end."""
    at: dict[str, dict[int, float]] = {}
    for what, number, when in events:
        at.setdefault(what, {})[number] = when
    end, computing = at["end"][0], max(at["gradient"].values())
    axis = TimeAxis(max(end, *at["done"].values()), LEFT, WIDTH)
    parts = [text(2, 21, "backward", "xt-tick")]
    begun = 0.0
    for number, when in at["gradient"].items():
        what = f"gradient of layer {number}"
        parts.append(axis.bar(what, begun, when, 4, ROW - 4, 0, 0.35))
        if axis.at(when) - axis.at(begun) > 12:
            middle = (axis.at(when) + axis.at(begun)) / 2
            parts.append(text(middle, 20, str(number), "xt-label", "middle"))
        begun = when
    for row, (bucket, sent) in enumerate(sorted(at["sent"].items()), start=1):
        y, colour = 4 + row * ROW, 1 + bucket % 6
        what, done = f"bucket {bucket}", at["done"][bucket]
        full = axis.at(at["ready"][bucket])
        parts += [
            text(2, y + 17, what, "xt-tick"),
            axis.bar(f"all-reduce of {what}", sent, done, y, ROW - 4, colour, 0.35),
            f'<circle cx="{full:.1f}" cy="{y + ROW / 2 - 2:.1f}" r="4" '
            f'class="xt-dot xt-s{colour}"><title>gradients complete</title></circle>',
        ]
    bottom = 4 + ROW * (len(at["sent"]) + 1)
    for when, kind in ((computing, "xt-mark"), (end, "xt-axis")):
        parts.append(line(axis.at(when), 2, axis.at(when), bottom, kind))
    parts += [axis.base(bottom + 2), *axis.ends(bottom + 18)]
    early = sum(sent < computing for sent in at["sent"].values())
    words = (
        f"{early} of {len(at['sent'])} buckets leave before the last gradient, which "
        f"is complete at {seconds(computing)}; backward returns at {seconds(end)}"
    )
    title = "Backward and its all-reduces over time"
    return document(WIDTH, bottom + 26, parts, title, words)
