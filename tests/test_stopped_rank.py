"""A rank that is stopped ends the others in the timeout given, in every lecture."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xtrain.backends  # noqa: F401, names of its own
from xtrain.comm import init_mesh, ring_all_reduce
from xtrain.comm.mesh import timeout_of
from xtrain.context_parallel import ring_attention
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import one_f_one_b
from xtrain.zero import FullyShardedDataParallel

LIMIT = 6.0  # seconds; groups of a mesh had torch's half an hour
Step = Callable[[], object]


def wrapped(kind: Callable[..., nn.Module], mesh: DeviceMesh) -> Step:
    model = kind(nn.Linear(4, 4), process_group=mesh.get_group())
    return lambda: model(torch.ones(2, 4)).sum().backward()


def model_on(mesh: DeviceMesh, **sizes: int) -> Step:
    config = XtrainConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        **sizes,
    )
    model, tokens = XtrainModel(config, mesh), torch.arange(8)[None]
    return lambda: model(tokens, labels=tokens).backward()


def pipeline(mesh: DeviceMesh) -> Step:
    stage = PipelineStage(nn.Linear(4, 4), mesh.get_local_rank(), 2)
    runner = PipelineRunner(
        stage,
        one_f_one_b(2, 2),
        lambda y, target: ((y - target).square().sum(), y.numel()),
        mesh.get_group(),
    )
    return lambda: runner.step(torch.ones(4, 4), torch.ones(4, 4))


def attention(mesh: DeviceMesh) -> Step:
    q, k, v = torch.ones(3, 1, 2, 4, 4)
    return lambda: ring_attention(q, k, v, group=mesh.get_group())


LECTURES: dict[str, Callable[[DeviceMesh], Step]] = {
    "data": lambda mesh: lambda: ring_all_reduce(torch.ones(4), group=mesh.get_group()),
    "ddp": lambda mesh: wrapped(DistributedDataParallel, mesh),
    "fsdp": lambda mesh: wrapped(FullyShardedDataParallel, mesh),
    "tensor": model_on,
    "pipeline": pipeline,
    "context": attention,
    "expert": lambda mesh: model_on(mesh, num_local_experts=2, num_experts_per_tok=1),
}


def stops(rank: int, path: Path, backend: str, name: str) -> None:
    """One of two ranks: a step of both, then rank 1 stops and rank 0 goes on."""
    store = dist.FileStore(f"{path}/{name}", 2)
    world = timedelta(seconds=123)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=world
    )
    inherited = init_mesh((2, 1), ("a", "b"))
    assert timeout_of(inherited["b"].get_group()) == world
    axis = name if name in ("tensor", "pipeline", "context", "expert") else "data"
    mesh = init_mesh((2,), (axis,), timeout=timedelta(seconds=LIMIT))
    step = LECTURES[name](mesh)
    step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began, error = time.monotonic(), ""
    try:
        while True:
            step()
    except RuntimeError as caught:
        error = str(caught)
    (path / f"{name}.said").write_text(f"{time.monotonic() - began}\n{error}")
    os._exit(0)


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh")
@pytest.mark.parametrize("backend", ["gloo", "xtrain-shm"])
def test_a_stopped_rank_ends_the_others_in_the_time_given(tmp_path, backend):
    fork = multiprocessing.get_context("fork")
    ranks = {
        (name, rank): fork.Process(target=stops, args=(rank, tmp_path, backend, name))
        for name in LECTURES
        for rank in range(2)
    }
    for process in ranks.values():
        process.start()
    for (_, rank), process in ranks.items():
        if rank == 0:
            process.join(120.0)
    for process in ranks.values():
        process.kill()
        process.join()
    for name in LECTURES:
        seconds, said = (tmp_path / f"{name}.said").read_text().split("\n", 1)
        assert float(seconds) < LIMIT + 6.0, (name, seconds)
        if backend != "gloo" or name in ("pipeline", "fsdp"):
            assert re.search("rank 1[ :]", said), (name, said)
