"""Checkpoints written by other processes while training goes on."""

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.test_refused import flip, truncate
from xtrain.checkpoint import (
    CheckpointError,
    Shard,
    latest,
    load_checkpoint,
    save_checkpoint,
)
from xtrain.checkpoint.background import BackgroundWriter, reserve

SYMBOLS = (
    "xtrain.checkpoint.background:BackgroundWriter",
    "xtrain.checkpoint.training_state:save_checkpoint",
)


def model_of(rank: int, size: int):
    """Rows of a weight, and a bias that all ranks hold; a step of Adam."""
    torch.manual_seed(0)
    whole, bias = torch.randn(4 * size, 5), torch.randn(7, dtype=torch.bfloat16)
    parts = [nn.Parameter(t.clone()) for t in (whole.chunk(size)[rank], bias)]
    optimizer = torch.optim.Adam(parts, lr=0.1)
    shards = [
        Shard("weight", (4 * size, 5), (4 * rank, 0), parts[0]),
        Shard("bias", (7,), (0,), parts[1]),
    ]
    return shards, optimizer


def step(shards, optimizer) -> None:
    for shard in shards:
        shard.tensor.grad = torch.ones_like(shard.tensor) + shard.tensor.detach()
    optimizer.step()


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def written_twice(directory: str) -> None:
    """The files are those of a save that waits, although the weights change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter()
    for number in range(3):
        step(shards, optimizer)
        arguments = number, shards, optimizer, {"epoch": number}
        save_checkpoint(f"{directory}/waits", *arguments)
        save_checkpoint(f"{directory}/goes on", *arguments, write=writer)
        with torch.no_grad():
            for shard in shards:
                shard.tensor.add_(1000)
                shard.tensor.sub_(1000).mul_(1.5)
    writer.close()
    assert not writer.shared.exists()
    for number in range(3):
        name = f"step-{number:08d}"
        found, right = (
            files(Path(directory, kind, name)) for kind in ("goes on", "waits")
        )
        assert found == right
    assert latest(f"{directory}/goes on") == Path(directory, "goes on", "step-00000002")
    assert [p.name for p in Path(directory, "goes on").glob(".*")] == [".lock"]


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_its_files_are_those_of_a_save_that_waits(world, tmp_path, size):
    world(size).run(written_twice, str(tmp_path))


def killed(directory: str) -> None:
    """Rank 1's writer is killed before it can write; then all go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter(seconds=20)
    save_checkpoint(directory, 1, shards, optimizer, write=writer)
    writer.wait()
    if rank == 1:
        assert writer.process is not None
        os.kill(writer.process.pid, signal.SIGSTOP)
    save_checkpoint(directory, 2, shards, optimizer, write=writer)
    if rank == 1:
        os.kill(writer.process.pid, signal.SIGKILL)
    with pytest.raises(
        CheckpointError, match=r"the writer of rank 1 ended by signal 9"
    ):
        writer.wait()
    assert latest(directory) == Path(directory, "step-00000001")
    save_checkpoint(directory, 3, shards, optimizer, write=writer)
    writer.close()
    assert latest(directory) == Path(directory, "step-00000003")


@pytest.mark.verifies(*SYMBOLS)
def test_a_killed_writer_is_named_on_every_rank_and_loses_nothing(world, tmp_path):
    world(2).run(killed, str(tmp_path))
    found = world(2).run(loaded, str(tmp_path))
    assert found == [3, 3]


def loaded(directory: str) -> int:
    shards, optimizer = model_of(dist.get_rank(), dist.get_world_size())
    return load_checkpoint(directory, shards, optimizer)[0]


def killed_between(directory: str) -> None:
    """Rank 1's writer is killed while nothing is saved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter(seconds=20)
    save_checkpoint(directory, 1, shards, optimizer, write=writer)
    writer.wait()
    if rank == 1:
        assert writer.process is not None
        writer.process.kill()
        writer.process.wait()
    save_checkpoint(directory, 2, shards, optimizer, write=writer)
    writer.close()
    assert latest(directory) == Path(directory, "step-00000002")


@pytest.mark.verifies(*SYMBOLS)
def test_after_a_writer_was_killed_all_ranks_start_new_ones(world, tmp_path):
    world(2).run(killed_between, str(tmp_path))


def full(directory: str) -> None:
    """There is no room for the copy of rank 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter()
    if rank == 1:
        writer.shared = Path("/dev/full/nothing")
    with pytest.raises(OSError, match="/dev/full/nothing"):
        save_checkpoint(directory, 1, shards, optimizer, write=writer)
    if rank == 1:
        writer.shared = Path(directory) / "shared"
    writer.end()
    save_checkpoint(directory, 2, shards, optimizer, write=writer)
    writer.close()
    assert latest(directory) == Path(directory, "step-00000002")


@pytest.mark.verifies(*SYMBOLS)
def test_no_room_for_the_copy_is_an_error_on_every_rank(world, tmp_path):
    world(2).run(full, str(tmp_path))


def test_memory_that_is_not_there_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(OSError, match="space|large"):
        reserve(tmp_path / "large", 1 << 60)


FULL = """
import safetensors.torch
save_file = safetensors.torch.save_file
def refused(tensors, path):
    if "step-00000002" in str(path) and "rank-00001" in str(path):
        raise OSError(28, "No space left on device")
    save_file(tensors, path)
safetensors.torch.save_file = refused
"""
"""What a writer imports at its start, of which rank 1 has no room for step 2."""


def no_room(directory: str, how: str, path: str) -> str:
    """Rank 1's writer cannot write its file; then all go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter(seconds=20)
    with environment(PYTHONPATH=path):
        save_checkpoint(directory, 1, shards, optimizer, write=writer)
        writer.wait()
        dist.barrier()
    if rank == 1 and how == "File too large":
        few = 100, 100
        resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, few)
    save_checkpoint(directory, 2, shards, optimizer, write=writer)
    with pytest.raises(CheckpointError) as caught:
        writer.wait()
    assert latest(directory) == Path(directory, "step-00000001")
    assert not list(Path(directory).glob(".partial-*"))
    assert loaded(directory) == 1
    save_checkpoint(directory, 3, shards, optimizer, write=writer)
    writer.close()
    assert loaded(directory) == 3 and loaded(f"{directory}/step-00000001") == 1
    return str(caught.value)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("how", ["No space left on device", "File too large"])
def test_a_disk_without_room_is_named_on_every_rank_and_loses_nothing(
    world, tmp_path, how
):
    if how == "File too large" and not hasattr(resource, "prlimit"):
        pytest.skip("another process is limited by prlimit, which Linux has")
    full = tmp_path / "full"
    full.mkdir()
    (full / "sitecustomize.py").write_text(FULL if how.startswith("No") else "")
    errors = world(2).run(no_room, str(tmp_path / "run"), how, str(full))
    assert len(set(errors)) == 1
    assert "step 2 was not saved" in errors[0] and how in errors[0]
    assert re.search(r"rank 1: \S+/rank-00001.safetensors cannot be written", errors[0])


def written_and_kept(directory: str) -> None:
    """Two steps, of other weights."""
    shards, optimizer = model_of(dist.get_rank(), dist.get_world_size())
    writer = BackgroundWriter()
    for number in (1, 2):
        step(shards, optimizer)
        save_checkpoint(directory, number, shards, optimizer, write=writer)
    writer.close()


def damaged(directory: str) -> str:
    """The error of the newest; it changes nothing, and the one before is whole."""
    shards, optimizer = model_of(dist.get_rank(), dist.get_world_size())
    before = [shard.tensor.detach().clone() for shard in shards]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, shards, optimizer)
    assert all(torch.equal(s.tensor, t) for s, t in zip(shards, before, strict=True))
    assert load_checkpoint(f"{directory}/step-00000001", shards, optimizer)[0] == 1
    right, other = model_of(dist.get_rank(), dist.get_world_size())
    step(right, other)
    for shard, expected in zip(shards, right, strict=True):
        assert torch.equal(shard.tensor, expected.tensor)
    return str(caught.value)


@pytest.mark.verifies(*SYMBOLS, "xtrain.checkpoint.training_state:load_checkpoint")
def test_a_damaged_file_of_a_writer_is_named_on_every_rank(world, tmp_path):
    world(2).run(written_and_kept, str(tmp_path))
    path = latest(tmp_path) / "rank-00001.safetensors"
    assert path.parent.name == "step-00000002"
    good = path.read_bytes()
    for how, rule in ((flip, "wrong checksum"), (truncate, "bytes")):
        how(path, "weight")
        errors = world(2).run(damaged, str(tmp_path))
        assert len(set(errors)) == 1
        assert f"{path} is damaged" in errors[0] and rule in errors[0]
        path.write_bytes(good)
    assert world(2).run(loaded, str(tmp_path)) == [2, 2]


def no_folder(directory: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter()
    place = f"{directory}/file/run"
    with pytest.raises((CheckpointError, OSError), match="file"):
        save_checkpoint(place, 1, shards, optimizer, write=writer)
    writer.close()


@pytest.mark.verifies(*SYMBOLS)
def test_a_folder_that_cannot_be_made_is_named_at_once(world, tmp_path):
    (tmp_path / "file").write_text("")
    world(2).run(no_folder, str(tmp_path))


def taken_away(directory: str) -> None:
    """The folder vanishes while training goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, optimizer = model_of(rank, size)
    writer = BackgroundWriter()
    save_checkpoint(directory, 1, shards, optimizer, write=writer)
    writer.wait()
    dist.barrier()
    if rank == 0:
        os.rename(directory, f"{directory}.gone")
        Path(directory).write_text("")
    dist.barrier()
    writer.joined = True
    writer._join = lambda directory: None  # type: ignore[method-assign]
    save_checkpoint(directory, 2, shards, optimizer, write=writer)
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        writer.wait()
    writer.close()


@pytest.mark.verifies(*SYMBOLS)
def test_an_error_of_the_writers_is_raised_on_every_rank(world, tmp_path):
    world(2).run(taken_away, str(tmp_path / "run"))


def come_and_go(directory: str) -> None:
    shards, optimizer = model_of(dist.get_rank(), dist.get_world_size())
    writer = BackgroundWriter()
    save_checkpoint(directory, 1, shards, optimizer, write=writer)
    assert writer.shared.exists()
    writer.close()
    assert not writer.shared.exists()


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("size", [1, 2])
def test_nothing_stays_in_shared_memory(world, tmp_path, size):
    world(size).run(come_and_go, str(tmp_path))
