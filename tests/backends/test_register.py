"""How torch comes to know the backends, and what it asks of a group of theirs."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import xtrain.backends
from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.segments import FINGERPRINT, SIDEBAND
from xtrain.backends.shared_memory import SharedMemory

ONLY_IMPORTED = """
import sys
import torch
import torch.distributed as dist
assert not any(name.split(".")[0] == "xtrain" for name in sys.modules), "entry point"
import xtrain.backends
for backend in ("xtrain-shm", "xtrain-socket"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    xtrain.backends.register()
    total = torch.ones(3)
    dist.all_reduce(total)
    print(dist.get_backend(), total.tolist())
    dist.destroy_process_group()
"""


def test_importing_the_package_registers_and_torch_alone_does_not_load_it():
    done = subprocess.run(
        [sys.executable, "-c", ONLY_IMPORTED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "xtrain-shm [1.0, 1.0, 1.0]",
        "xtrain-socket [1.0, 1.0, 1.0]",
    ]


@pytest.mark.verifies("xtrain.backends:register")
def test_a_flight_recorder_is_told_to_leave_the_groups_alone(monkeypatch):
    name = "_FR_SELF_RECORDING_BACKENDS"
    monkeypatch.setattr(dist.distributed_c10d, name, {"gloo"}, raising=False)
    xtrain.backends.register()
    known = getattr(dist.distributed_c10d, name)
    assert known == {"gloo", *xtrain.backends.BACKENDS}
    monkeypatch.delattr(dist.distributed_c10d, name)
    xtrain.backends.register()  # torch before 2.15 has no such set


def asked_for_its_backend() -> None:
    """As `batch_isend_irecv` asks since torch 2.14, `split_group` and others."""
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_coalescing is False
    assert backend.supports_splitting is False
    assert backend.name() == dist.get_backend()
    with pytest.raises(RuntimeError, match="no backend for device type cuda"):
        group._get_backend(torch.device("cuda"))


def test_a_group_is_its_own_backend_on_the_cpu_only(ours):
    ours(2).run(asked_for_its_backend)


class TwoSteps(SharedMemory):
    ONE_SHOT_BYTES = 0


class Unchecked(XtrainProcessGroup):
    compares_calls = False


def steps_of_variants():
    """Steps of a small all-reduce on three backends; was the call's print left?"""
    steps = []
    for number, (transport, kind) in enumerate(
        [
            (SharedMemory, XtrainProcessGroup),
            (TwoSteps, XtrainProcessGroup),
            (SharedMemory, Unchecked),
        ]
    ):
        name = f"xtrain-variant-{number}"
        xtrain.backends.register_variant(name, transport, kind)
        group = dist.new_group(backend=name)
        tensor = torch.ones(4) * (1 + dist.get_rank())
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [3.0] * 4
        words = group._transport.mine.words
        steps.append((group._transport.step, any(words[FINGERPRINT:SIDEBAND])))
        dist.destroy_process_group(group)
    return steps


@pytest.mark.verifies("xtrain.backends:register_variant")
def test_a_variant_is_a_backend_of_its_own(world):
    for steps in world(2).run(steps_of_variants):
        (usual, checked), (split, _), (same, unchecked) = steps
        assert (checked, unchecked) == (True, False)
        assert split > usual == same
