"""How torch comes to know the backends, and what it asks of a group of theirs."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import xtrain.backends

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
    assert known == {"gloo", "xtrain-shm", "xtrain-socket"}
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
