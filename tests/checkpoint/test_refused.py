"""A checkpoint that is refused has changed nothing, on no rank."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.test_checkpoint import Run, refused, small
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Piece,
    latest,
    save_pieces,
)
from xtrain.cluster.per_rank import replaced
from xtrain.testing import expect_error
from xtrain.zero import AdamW, FullyShardedDataParallel, LossScaler

LOAD = "xtrain.checkpoint.training_state:load_state"
SAVE = "xtrain.checkpoint.training_state:save_state"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"


def train_and_save(stage, directory, step=2):
    run = Run(stage, seed=0, lr=0.02)
    run.train(0, 2)
    run.save(directory, step, LossScaler(init_scale=4.0).state_dict())


def everything(run):
    """Copies of every live tensor of a run, and all that is not a tensor, as text."""
    inner = run.optimizer if run.stage == 3 else run.optimizer.optimizer
    tensors = {f"weights {n}": t for n, t in run.bare.state_dict().items()}
    tensors["random"] = torch.get_rng_state()
    if run.stage < 3:
        for number, bucket in enumerate(run.optimizer.buckets):
            tensors[f"flat {number}"] = bucket.flat
    texts = [
        {key: value for key, value in group.items() if key != "params"}
        for group in inner.param_groups
    ]
    for number, group in enumerate(inner.param_groups):
        for place, parameter in enumerate(group["params"]):
            label = f"{number} {place}"
            tensors[f"master {label}"] = parameter
            for key, value in inner.state.get(parameter, {}).items():
                tensors[f"{key} {label}"] = value
    copies = {label: t.detach().clone() for label, t in tensors.items()}
    return copies, repr(texts)


def load_damaged(stage, path):
    """The error; whatever it is, nothing has changed."""
    run = Run(stage, seed=9 + dist.get_rank(), lr=0.5)
    run.train(0, 1)
    scaler = LossScaler(init_scale=8.0)
    before, options = everything(run)
    try:
        _, extra = run.load(path)
        scaler.load_state_dict(extra)
    except CheckpointError as error:
        after, options_after = everything(run)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[label], before[label]) for label in before)
        assert options_after == options
        assert scaler.scale == 8.0
        run.train(1, 2)  # nobody is out of step
        return str(error)
    raise AssertionError(f"{path} was loaded")


def header_of(data: bytes) -> tuple[int, dict]:
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def flip(path: Path, name: str) -> None:
    """One bit in the last byte of a stored tensor."""
    data = bytearray(path.read_bytes())
    start, header = header_of(data)
    entry = [e for n, e in header.items() if n.startswith(f"{name}@")][-1]
    data[start + entry["data_offsets"][1] - 1] ^= 1
    path.write_bytes(data)


def truncate(path: Path, _: str) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite_dtype(path: Path, _: str) -> None:
    """All bytes of the tensors are right, and mean something else."""
    data = path.read_bytes()
    start, _ = header_of(data)
    path.write_bytes(data[:start].replace(b'"F64"', b'"I64"') + data[start:])


DAMAGES = [
    (flip, 1, "layers.2.mlp.down_proj.weight", "wrong checksum"),
    (flip, 0, ":cut:exp_avg_sq:embed_tokens.weight", "wrong checksum"),
    (flip, 1, ":random:cpu:1", "wrong checksum"),  # nobody needs it at 3 ranks
    (flip, 0, "scale", "wrong checksum"),
    (truncate, 1, "", "bytes"),
    (overwrite_dtype, 1, "", "dtype int64"),
]


@pytest.mark.verifies(LOAD, SAVE, FSDP)
@pytest.mark.parametrize(("stage", "size"), [(1, 3), (2, 2), (3, 2), (3, 3), (3, 1)])
def test_a_damaged_file_changes_nothing_on_any_rank(world, tmp_path, stage, size):
    """Saved on two ranks in stage 3 and loaded in any, resharded and not."""
    world(2).run(train_and_save, 3, str(tmp_path))
    for how, number, name, match in DAMAGES:
        path = latest(tmp_path) / f"rank-{number:05d}.safetensors"
        good = path.read_bytes()
        how(path, name)
        assert path.read_bytes() != good
        errors = world(size).run(load_damaged, stage, str(tmp_path))
        assert len(set(errors)) == 1, errors
        assert f"{path} is damaged" in errors[0]
        assert match in errors[0]
        assert name in errors[0]
        path.write_bytes(good)


def refuse_unlike_others(first, second):
    """Rank 1 is given another path."""
    return load_damaged(3, first if dist.get_rank() != 1 else second)


@pytest.mark.verifies(LOAD, SAVE, FSDP)
def test_ranks_that_load_different_checkpoints_are_told(world, tmp_path):
    for step, run in enumerate("ab"):
        world(2).run(train_and_save, 3, str(tmp_path / run), step)
    paths = str(tmp_path / "a"), str(tmp_path / "b")
    for error in world(3).run(refuse_unlike_others, *paths):
        assert "ranks 0 and 1 load different checkpoints" in error
        assert all(path in error for path in paths)
    for error in world(2).run(refuse_unlike_others, paths[0], str(tmp_path / "c")):
        assert "c is not a checkpoint" in error


def save_bare_pieces(directory):
    rank = dist.get_rank()
    save_pieces(directory, 0, [Piece("weight", (2,), (rank,), torch.ones(1))])


def load_bare_pieces(directory):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    FullyShardedDataParallel(module).load_sharded(directory)


@pytest.mark.verifies("xtrain.checkpoint.files:save_pieces", FSDP)
def test_pieces_of_something_else_are_refused(world, tmp_path):
    world(2).run(save_bare_pieces, str(tmp_path))
    match = "not a checkpoint of a sharded model"
    refused(world(2), load_bare_pieces, str(tmp_path), match=match)


def verify_shares(directory, size):
    """Which pieces each of so many ranks would look at, wanting nothing."""
    reader, shares = CheckpointReader(latest(directory)), [[] for _ in range(size)]
    original = reader.check_data

    def check_data(path, stored, data):
        shares[rank].append(stored)
        original(path, stored, data)

    reader.check_data = check_data
    for rank in range(size):
        reader.verify([], rank, size)
    return reader, shares


@pytest.mark.verifies("xtrain.checkpoint.reader:CheckpointReader", SAVE, FSDP)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_share_the_work_and_leave_nothing_out(world, tmp_path, size):
    world(2).run(train_and_save, 3, str(tmp_path))
    reader, shares = verify_shares(tmp_path, size)
    looked = [stored for share in shares for stored in share]
    pieces = [
        (file, name, f"{name}@{','.join(map(str, offset))}")
        for name, entry in reader.tensors.items()
        for offset, _, file, _ in entry["pieces"]
    ]
    assert sorted(stored[:3] for stored in looked) == sorted(pieces)
    assert {stored.file for stored in looked} == set(reader.index["files"])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.verifies("xtrain.checkpoint.reader:CheckpointReader", SAVE, FSDP)
def test_a_piece_that_is_wanted_is_looked_at_by_whoever_wants_it(world, tmp_path):
    """On every rank: its own file system may be the one that is damaged."""
    world(2).run(train_and_save, 3, str(tmp_path))
    flip(latest(tmp_path) / "rank-00000.safetensors", "scale")
    reader = CheckpointReader(latest(tmp_path))
    wanted = [Piece("scale", (), (), torch.zeros((), dtype=torch.float64))]
    for rank in range(3):
        with pytest.raises(CheckpointError, match="rank-00000.*scale.*checksum"):
            reader.verify(wanted, rank, 3)
    assert wanted[0].data.item() == 0
    empty = [Piece("nothing", (0, 3), (0, 0), torch.zeros(0, 3))]
    assert list(reader.overlapping(empty[0])) == []


# -- saving


def save_step(directory, steps):
    rank = dist.get_rank()
    model = FullyShardedDataParallel(small())
    model.save_sharded(directory, steps[rank % len(steps)])


@pytest.mark.verifies(FSDP)
@pytest.mark.parametrize(
    ("steps", "match"),
    [
        (["3"], "step='3' on rank 0"),
        ([2.0], r"step=2\.0 on rank 0"),
        ([-1], "step=-1 on rank 0"),
        ([True], "step=True on rank 0"),
        ([None], "step=None on rank 0"),
        ([4, 5], "step=5 on rank 1, 4 on rank 0"),
    ],
)
def test_a_bad_step_is_refused_on_every_rank(world, tmp_path, steps, match):
    expect_error(world(3), save_step, str(tmp_path), steps, match=match)
    assert list(tmp_path.iterdir()) == []


def save_odd_state(directory):
    """Only rank 1's optimizer has state of a shape that cannot be cut."""
    model = FullyShardedDataParallel(small())
    optimizer = AdamW(model.parameters())
    if dist.get_rank() == 1:
        piece = next(p for p in model.parameters() if p.numel())
        optimizer.state[piece] = {"rows": torch.zeros(2, 2)}
    model.save_sharded(directory, 0, optimizer)


@pytest.mark.verifies(FSDP)
def test_state_that_cannot_be_cut_is_refused_on_every_rank(world, tmp_path):
    match = r"rows of 0\.\w+ has shape \(2, 2\)"
    expect_error(world(3), save_odd_state, str(tmp_path), match=match)
    assert latest(tmp_path) is None


def save_two_dtypes(directory):
    rank = dist.get_rank()
    dtype = torch.float32 if rank else torch.float64
    save_pieces(
        directory, 0, [Piece("weight", (2,), (rank,), torch.ones(1, dtype=dtype))]
    )


@pytest.mark.verifies("xtrain.checkpoint.files:save_pieces")
def test_pieces_of_two_dtypes_are_not_saved(world, tmp_path):
    match = "weight: dtype float64 and float32 on different ranks"
    refused(world(2), save_two_dtypes, str(tmp_path), match=match)
    assert latest(tmp_path) is None


class Empty(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.number = nn.Parameter(torch.tensor(value))
        self.register_buffer("nothing", torch.zeros(2, 0))

    def forward(self):
        return self.number.square() + self.none.sum()


def save_and_load_empty(directory):
    model = FullyShardedDataParallel(Empty(3.0))
    optimizer = AdamW(model.parameters())
    model().backward()
    optimizer.step()
    model.save_sharded(directory, 0, optimizer)
    dist.barrier()
    other = FullyShardedDataParallel(Empty(5.0))
    other.load_sharded(directory, AdamW(other.parameters()))
    mine, theirs = model.full_state_dict(), other.full_state_dict()
    assert mine["none"].shape == theirs["none"].shape == (0, 3)
    assert torch.equal(mine["number"], theirs["number"])


@pytest.mark.verifies(FSDP)
def test_tensors_without_elements(world, tmp_path):
    world(2).run(save_and_load_empty, str(tmp_path))


def record_order(directory):
    """Every fsync, rename and replace of a save, with the file's name."""
    events = []
    originals = os.fsync, os.rename, os.replace
    names = "fsync", "rename", "replace"

    def fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        originals[0](descriptor)

    def rename(source, target):
        events.append(("rename", Path(target).name))
        originals[1](source, target)

    def replace(source, target):
        events.append(("replace", Path(target).name))
        originals[2](source, target)

    with ExitStack() as stack:
        for name, noting in zip(names, (fsync, rename, replace), strict=True):
            stack.enter_context(replaced(os, name, noting))
        FullyShardedDataParallel(small()).save_sharded(directory, 7)
    return events


@pytest.mark.verifies(FSDP)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names files by /proc")
def test_everything_is_on_disk_before_it_is_named(world, tmp_path):
    first, second = world(2).run(record_order, str(tmp_path / "run"))
    assert second == [("fsync", "rank-00001.safetensors")]
    kinds = [kind for kind, _ in first]
    moved, pointed = kinds.index("rename"), kinds.index("replace")
    assert first[moved] == ("rename", "step-00000007")
    assert first[pointed] == ("replace", "latest")
    before = [name for kind, name in first[:moved] if kind == "fsync"]
    assert before[:2] == ["rank-00000.safetensors", "index.json"]
    assert before[2].startswith(".partial-step-00000007")  # the names in the folder
    assert [name[:8] for _, name in first[moved + 1 : pointed]] == [".latest-"]
    assert first[pointed + 1 :] == [("fsync", "run")]
    assert kinds.count("rename") == kinds.count("replace") == 1


def fail_to_sync(directory):
    """A rank that fails to write one byte to disk fails the save."""
    original = os.fsync

    def fsync(descriptor):
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error")
        original(descriptor)

    with replaced(os, "fsync", fsync):
        save_step(directory, [1])


@pytest.mark.verifies(FSDP)
def test_a_disk_that_fails_at_the_last_moment(world, tmp_path):
    match = "rank 1.*Input/output error"
    refused(world(2), fail_to_sync, str(tmp_path), match=match)
    assert latest(tmp_path) is None


# -- a bare model's file


def load_full(path):
    """The error; the weights have not changed. `{rank}` stands for this rank."""
    rank = dist.get_rank()
    model = FullyShardedDataParallel(small(rank))
    before = model.full_state_dict()
    try:
        model.load_full(path.format(rank=rank))
    except CheckpointError as error:
        after = model.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        return str(error)
    raise AssertionError(f"{path} was loaded")


@pytest.mark.verifies(FSDP)
@pytest.mark.parametrize("size", [2, 3])
def test_a_bare_models_file_that_is_refused_changes_nothing(world, tmp_path, size):
    path = tmp_path / "model.safetensors"
    save_file(dict(small(7).state_dict()), path)
    good = path.read_bytes()
    for bad in (good[:-1], good[:40], good.replace(b"[5,3]", b"[5,9]")):
        path.write_bytes(bad)
        errors = world(size).run(load_full, str(path))
        assert len(set(errors)) == 1
        assert str(path) in errors[0]


def test_a_bare_models_file_missing_on_one_rank_changes_nothing_on_any(world, tmp_path):
    for rank in (0, 2):
        save_file(dict(small(7).state_dict()), tmp_path / f"{rank}.safetensors")
    for said in world(3).run(load_full, f"{tmp_path}/{{rank}}.safetensors"):
        assert said.startswith(f"rank 1: {tmp_path}/1.safetensors cannot be read")
