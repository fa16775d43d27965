"""The run of DualPipe behind the page on overlap: a step of a decoder by the clock.

What computes sleeps, and so does the network of the experts' messages: `runs_overlap`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xtrain.bench.sleeping import SleepingLayer
from xtrain.bench.slow_network import SlowNetwork
from xtrain.expert_parallel.events import Event
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import OverlappedDecoderLayer
from xtrain.model.placement import batch_group
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

from .runs_overlap import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOKENS,
    TOP_K,
    Found,
    SleepingExperts,
    fastest,
    network,
)

CONFIG = XtrainConfig(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER,
    num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
    num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
)  # fmt: skip


class Waits:
    """Sleeps for a network, and remembers how long."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.seconds += time.perf_counter() - begin


def slow_experts(mesh: DeviceMesh, network_ms: float, waits: Waits) -> SlowNetwork:
    """This rank's expert group again, with a delay; every rank makes all of them."""
    groups = [
        network(network_ms, ranks.tolist(), waits)
        for ranks in mesh.mesh.view(-1, mesh["expert"].size())
    ]
    return next(group for group in groups if isinstance(group, SlowNetwork))


def dualpipe_by_the_clock(
    together: bool, micro_batches: int, compute_ms: float, network_ms: float
) -> Found:
    """A step of a decoder with experts on 2 pipeline times 2 expert ranks.

    Returns:
        How long it took, for how long this rank waited for experts' messages, and how
        many layers of forwards ran over a backward.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "expert"))
    schedule = SCHEDULES["dualpipe"](2, micro_batches)
    stages, waits, events = XtrainModel.stages(CONFIG, mesh, schedule), Waits(), []
    group = slow_experts(mesh, network_ms, waits)
    for stage in stages:
        for layer in stage.module.layers:
            make_slow(layer, group, events, compute_ms / 1e3)
        if not together:  # a pair is a forward, and then a backward
            stage.module.forward_with_backward = in_turn(stage.module)
    runner = PipelineRunner(
        stages,
        schedule,
        next((s.module.loss_fn for s in stages if s.module.has_head), no_loss),
        mesh["pipeline"].get_group(),
        data_group=batch_group(mesh),
    )
    tokens = torch.randint(64, (micro_batches, TOKENS))

    def step() -> None:
        waits.seconds = 0.0
        runner.step(tokens, tokens)

    def tell(_: SlowNetwork, events: list[Event]) -> Found:
        names = [event.name for event in events]
        pairs = zip(names, names[1:], strict=False)
        return {
            "total": runner.times[-1][1] - runner.times[0][0],
            "exposed": waits.seconds,
            "pairs": sum(p == ("compute B mlp", "wait F dispatch") for p in pairs),
        }

    return fastest(group, events, lambda: step, tell)


def make_slow(
    layer: OverlappedDecoderLayer,
    group: SlowNetwork,
    events: list[Event],
    seconds: float,
) -> None:
    """Attention and experts sleep, and the layer's messages take the slow network."""
    layer.events, layer.moe.group = events, group
    layer.moe.experts = SleepingExperts(layer.moe.experts, HIDDEN, seconds)  # type: ignore
    layer.self_attn = SleepingAttention(layer.self_attn, seconds)


def no_loss(*_: Any) -> Any:
    raise AssertionError("called where the last stage is not")


class SleepingAttention(nn.Module):
    """Attention that takes longer than it has to."""

    def __init__(self, attention: nn.Module, seconds: float):
        super().__init__()
        self.attention, self.sleep = attention, SleepingLayer(HIDDEN, seconds)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.attention(self.sleep(x), positions)


def in_turn(module: Any) -> Callable[..., Tensor]:
    """A pair without overlap."""

    def forward_with_backward(inputs: tuple, backward: Any) -> Tensor:
        output = module.forward_in_pieces(*inputs)
        backward()
        return output

    return forward_with_backward
