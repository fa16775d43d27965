"""Checkpoints: from any world size and stage to any other, and never half of one."""

import json
import os
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.devices import same_numbers
from tests.training import Model, batch_of, largest_difference, loss_of, make_model
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Piece,
    bare_file,
    files,
    latest,
    whole,
)
from xtrain.cluster.per_rank import replaced
from xtrain.testing import RankError, World, expect_error
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

LATEST = "xtrain.checkpoint.folder:latest"
PIECE = "xtrain.checkpoint.pieces:Piece"
READER = "xtrain.checkpoint.reader:CheckpointReader"
STATE = [f"xtrain.checkpoint.training_state:{name}_state" for name in ("load", "save")]
ZERO = "xtrain.zero.optimizer:ZeroOptimizer"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"

refused = partial(expect_error, error=CheckpointError)  # by every rank
BATCHES = 3  # a step's micro-batches, dealt out to whatever ranks there are


class Run:
    """A model under one of the stages, trained on the same data at any world size."""

    def __init__(self, stage, seed, lr, dtype=torch.float64, model=None):
        self.stage = stage
        bare = model or make_model(seed, frozen=True, dtype=dtype)
        self.bare = bare
        if stage == 3:
            self.model = FullyShardedDataParallel(bare, gradient_reduction="sum")
            named = list(self.model.named_parameters())
        else:
            self.model = bare
            named = list(bare.named_parameters())
        norms = [p for n, p in named if "norm" in n and p.requires_grad]
        others = [p for n, p in named if "norm" not in n and p.requires_grad]
        groups = [{"params": others}, {"params": norms, "weight_decay": 0.3}]
        options = {"lr": lr, "amsgrad": True}
        if stage == 3:
            self.optimizer = AdamW(groups, **options)
        else:
            options |= {"bucket_cap_mb": 2**-10, "gradient_reduction": "sum"}
            self.optimizer = ZeroOptimizer(
                groups, torch.optim.AdamW, stage=stage, **options
            )

    def train(self, first, last):
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(first, last):
            for micro in range(0, BATCHES + size, size):  # some get nothing but zeros
                mine = micro + rank
                loss = loss_of(self.model, batch_of(step, mine % BATCHES, 0))
                (loss * (mine < BATCHES)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self):
        if self.stage == 3:
            return self.model.full_state_dict()
        return dict(self.bare.state_dict())

    def save(self, directory, step, extra=None):
        if self.stage == 3:
            return self.model.save_sharded(directory, step, self.optimizer, extra)
        return self.optimizer.save_sharded(directory, step, self.bare, extra)

    def load(self, path):
        if self.stage == 3:
            return self.model.load_sharded(path, self.optimizer)
        return self.optimizer.load_sharded(path, self.bare)


def train_and_save(stage, directory):
    run = Run(stage, seed=0, lr=0.02)
    run.train(0, 3)
    run.save(directory, 3, {"epoch": 1, "loss": [0.5]})
    torch.manual_seed(dist.get_rank() + 50)
    path = run.save(directory, 3, {"epoch": 2, "loss": [0.5]})
    drawn = torch.rand(3)
    run.train(3, 6)
    return str(path), run.weights(), drawn


def load_and_train(stage, path):
    run = Run(stage, seed=9 + dist.get_rank(), lr=0.5)
    step, extra = run.load(path)
    assert (step, extra) == (3, {"epoch": 2, "loss": [0.5]})
    drawn = torch.rand(3)
    at_once = run.weights()
    run.train(3, 6)
    return at_once, run.weights(), drawn


@pytest.mark.verifies(LATEST, *STATE, ZERO, FSDP)
@pytest.mark.parametrize(
    ("stage", "size"), [(1, 2), (2, 3), (3, 1), (3, 4)], ids=lambda v: str(v)
)
def test_any_stage_and_size_continues_another(world, tmp_path, stage, size):
    saved = world(size).run(train_and_save, stage, str(tmp_path))
    _, expected, _ = saved[0]
    assert {path for path, *_ in saved} == {str(latest(tmp_path))}
    others = {1: [(3, 3), (1, 4)], 2: [(1, 1), (3, 2)], 3: [(2, 4), (3, 3)]}[stage]
    for other_stage, other_size in [*others, (stage, size)]:
        loaded = world(other_size).run(load_and_train, other_stage, str(tmp_path))
        for rank, (at_once, after, drawn) in enumerate(loaded):
            assert largest_difference(at_once, loaded[0][0]) == 0
            assert largest_difference(after, expected) < 1e-12, (
                other_stage,
                other_size,
            )
            if other_size == size:  # each rank draws on where it was
                assert torch.equal(drawn, saved[rank][2])
    # A step that is saved again replaces what was there before.
    names = [p.name for p in tmp_path.iterdir()]
    assert sorted(names) == sorted([".lock", "latest", latest(tmp_path).name])


def sixteen_bits(stage, directory, load):
    run = Run(
        stage, seed=4, lr=0.02, dtype=torch.bfloat16 if stage < 3 else torch.float32
    )
    if load:
        run.load(directory)
    else:
        run.train(0, 2)
        run.save(directory, 2)
    if stage == 3:
        return run.weights()
    shards = {n: t for n, t in run.bare.state_dict().items() if "up.weight" in n}
    masters = [b.master.detach().clone() for b in run.optimizer.buckets]
    return shards, masters


@pytest.mark.verifies(*STATE, ZERO, FSDP)
def test_masters_are_what_is_saved(world, tmp_path):
    """fp32 masters of 16-bit weights come back exactly, and into stage 3's shards."""
    saved = world(2).run(sixteen_bits, 2, str(tmp_path), False)
    loaded = world(2).run(sixteen_bits, 1, str(tmp_path), True)
    for (weights, masters), (again, masters_again) in zip(saved, loaded, strict=True):
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert all(map(torch.equal, masters, masters_again))
    (whole, *_) = world(3).run(sixteen_bits, 3, str(tmp_path), True)
    for name, tensor in saved[0][0].items():
        assert torch.equal(whole[name].bfloat16(), tensor)
        assert name == "layers.1.mlp.up_proj.weight" or not torch.equal(
            whole[name], tensor.float()
        )


# -- faults


def small(seed=0, width=5):
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the same numbers on every device
        drawn = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    return drawn.to(torch.get_default_device())


def save_small(directory, step, seed=0):
    model = FullyShardedDataParallel(small(seed))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    model.save_sharded(directory, step, optimizer, {"seed": seed})
    return model.full_state_dict()


def load_small(path, seed=8, width=5, with_optimizer=True):
    model = FullyShardedDataParallel(small(seed, width))
    optimizer = AdamW(model.parameters()) if with_optimizer else None
    step, extra = model.load_sharded(path, optimizer)
    return step, extra, model.full_state_dict()


def killed_while_saving(directory, victim, after_writing):
    original = files.write_file

    def write_file(*arguments):
        if dist.get_rank() == victim and not after_writing:
            os.kill(os.getpid(), signal.SIGKILL)
        manifest = original(*arguments)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return manifest

    with replaced(files, "write_file", write_file):
        save_small(directory, 2, seed=1)


@pytest.mark.verifies(LATEST, FSDP)
@pytest.mark.parametrize(("victim", "after"), [(0, True), (1, False)])
def test_a_rank_killed_between_shards_leaves_the_previous(tmp_path, victim, after):
    with World(3) as world:
        (expected, *_) = world.run(save_small, str(tmp_path), 1)
    with World(3) as world, pytest.raises(RankError, match="SIGKILL|killed|signal 9"):
        world.run(killed_while_saving, str(tmp_path), victim, after, timeout=20)
    assert latest(tmp_path).name == "step-00000001"
    assert list(tmp_path.glob(".partial-*"))  # what it had begun
    with World(2) as world:
        for step, extra, state in world.run(load_small, str(tmp_path)):
            assert (step, extra) == (1, {"seed": 0})
            assert largest_difference(state, expected) == 0
        world.run(save_small, str(tmp_path), 2, 1)
    assert latest(tmp_path).name == "step-00000002"
    assert not list(tmp_path.glob(".partial-*"))


def save_that_fails(directory, what):
    original = files.save_file

    def save_file(tensors, path):
        if what == "disk" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        original(tensors, path)

    with replaced(files, "save_file", save_file):
        model = FullyShardedDataParallel(small(3))
        extra = {"bad": object()} if what == "extra" else None
        model.save_sharded(directory, 5, None, extra)


@pytest.mark.verifies(LATEST, FSDP)
def test_a_failing_save_fails_on_every_rank(world, tmp_path):
    (expected, *_) = world(2).run(save_small, str(tmp_path), 1)
    for what, match in ("disk", "rank 1.*No space"), ("extra", "rank 0.*serializable"):
        refused(world(2), save_that_fails, str(tmp_path), what, match=match)
        assert latest(tmp_path).name == "step-00000001"
        assert not list(tmp_path.glob(".partial-*"))
    (_, _, state), *_ = world(2).run(load_small, str(tmp_path))
    assert largest_difference(state, expected) == 0
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(world(2), save_that_fails, str(blocked), "", match="not saved")


def damage(path: Path, how: str):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[:-7]
    elif how == "missing":
        path.unlink()
        return
    else:  # one bit of the first tensor, or of the text
        place = len(data) // 2
        if path.suffix == ".safetensors":
            place = 10 + int.from_bytes(data[:8], "little")
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.verifies(LATEST, FSDP)
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("file", ["rank-00001.safetensors", "index.json"])
def test_damage_is_refused_by_name_on_every_rank(world, tmp_path, file, how):
    world(2).run(save_small, str(tmp_path), 1)
    path = latest(tmp_path) / file
    damage(path, how)
    match = "no index.json" if (file, how) == ("index.json", "missing") else "damaged"
    errors = refused(world(3), load_small, str(tmp_path), match=match)
    assert all(file in str(error) for error in errors)


@pytest.mark.verifies(LATEST, PIECE, READER, FSDP)
def test_flipped_bits_are_found(tmp_path, world):
    """Of its data, and of the index."""
    world(1).run(save_small, str(tmp_path), 1)
    path = latest(tmp_path) / "rank-00000.safetensors"
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    places = range(header, len(good), max(1, (len(good) - header) // 40))
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        reader = CheckpointReader(latest(tmp_path))
        wanted = [
            whole(n, torch.zeros(e["shape"], dtype=dtype_of(e))).pieces()[0]
            for n, e in reader.tensors.items()
        ]
        with pytest.raises(CheckpointError, match="is damaged"):
            reader.read(wanted)

    path.write_bytes(good)
    path = latest(tmp_path) / "index.json"
    good = path.read_bytes()
    for place in range(0, len(good), len(good) // 60):
        data = bytearray(good)
        data[place] ^= 1  # often another digit, and still JSON
        path.write_bytes(data)
        if data.split() != good.split():
            with pytest.raises(CheckpointError, match=r"index.json is damaged|format"):
                CheckpointReader(latest(tmp_path))


def dtype_of(entry):
    return getattr(torch, entry["dtype"])


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = small()


def load_other(path, kind):
    if kind == "wider":
        load_small(path, width=6)
    elif kind == "renamed":
        FullyShardedDataParallel(Renamed()).load_sharded(path)
    elif kind == "zero":
        model = small(width=6)
        ZeroOptimizer(model.parameters(), AdamW).load_sharded(path, model)
    else:
        model = FullyShardedDataParallel(small())
        groups = [{"params": p} for p in model.parameters()]
        model.load_sharded(path, AdamW(groups))


@pytest.mark.verifies(ZERO, FSDP)
def test_another_model_is_told_by_names_and_shapes(world, tmp_path):
    world(2).run(save_small, str(tmp_path), 1)
    for kind, line in (
        ("wider", r"0\.weight: \[5, 3\] in the checkpoint, \[6, 3\] here"),
        ("wider", r"1\.running_var: \[5\] in the checkpoint, \[6\] here"),
        ("zero", r"0\.bias: \[5\] in the checkpoint, \[6\] here"),
        ("renamed", r"first\.weight: not in the checkpoint, \[5, 3\] here"),
        ("renamed", r"0\.weight: \[5, 3\] in the checkpoint, not here"),
        ("renamed", r"norm\.running_mean: not in the checkpoint"),
        ("groups", "1 groups of parameters, the optimizer 4"),
    ):
        refused(world(2), load_other, str(tmp_path), kind, match=line)


def save_without_optimizer(directory):
    FullyShardedDataParallel(small()).save_sharded(directory, 4)


@pytest.mark.verifies(FSDP)
def test_a_checkpoint_without_optimizer_state(world, tmp_path):
    world(2).run(save_without_optimizer, str(tmp_path))
    refused(world(2), load_small, str(tmp_path), match="no optimizer state")
    (step, extra, state), *_ = world(3).run(load_small, str(tmp_path), 8, 5, False)
    assert (step, extra) == (4, None)
    assert torch.equal(state["0.weight"], small().state_dict()["0.weight"])


@pytest.mark.verifies(LATEST, READER)
def test_no_checkpoint_yet(tmp_path):
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no index.json"):
        CheckpointReader(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        CheckpointReader(tmp_path)


def missing_piece(directory):
    rank = dist.get_rank()
    data = torch.ones(2 if rank else 3)
    piece = Piece("weight", (6,), (4 * rank,), data)
    files.save_pieces(directory, 0, [piece])


@pytest.mark.verifies("xtrain.checkpoint.files:save_pieces", LATEST, PIECE)
def test_pieces_that_do_not_cover_are_not_saved(world, tmp_path):
    match = r"weight: element \[3\] is in no piece"
    refused(world(2), missing_piece, str(tmp_path), match=match)
    assert latest(tmp_path) is None


# -- a bare model's file


class Counting:
    """A file that safe_open has opened, or a slice of it: counts what is read."""

    def __init__(self, opened, read):
        self.opened, self.read = opened, read

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def get_slice(self, name):
        return Counting(self.opened.get_slice(name), self.read)

    def get_tensor(self, name):
        return self.count(self.opened.get_tensor(name))

    def __getitem__(self, index):
        return self.count(self.opened[index])

    def count(self, tensor):
        self.read.append(tensor.numel())
        return tensor


def load_full(path, meta):
    rank, size = dist.get_rank(), dist.get_world_size()
    read, safe_open = [], bare_file.safe_open

    @contextmanager
    def counting_open(*args, **kwargs):
        with safe_open(*args, **kwargs) as opened:
            yield Counting(opened, read)

    with torch.device("meta" if meta else torch.get_default_device()):
        bare = Model()
    model = FullyShardedDataParallel(bare.double())
    with replaced(bare_file, "safe_open", counting_open):
        model.load_full(path)
    expected = make_model(6)
    assert largest_difference(model.full_state_dict(), dict(expected.state_dict())) == 0
    loss = loss_of(model, batch_of(0, 0, rank))
    right = loss_of(expected, batch_of(0, 0, rank))
    assert same_numbers(loss, right, torch.float64)
    loss.backward()
    shards = [s for u in model.units for s in u.flat_groups]
    held = sum(s.layout.shard_numel for s in shards)
    # Rows are read whole: at most two more for each matrix, besides the buffer.
    slack = sum(2 * p.shape[-1] for p in expected.parameters() if p.dim() == 2) + 1
    whole = sum(p.numel() for p in expected.parameters())
    assert whole == sum(s.layout.numel for s in shards)
    return sum(read), held + slack, whole / size


@pytest.mark.verifies(FSDP)
def test_a_bare_models_file_is_read_in_ranges(world, tmp_path):
    state = dict(make_model(6).state_dict())
    tied = ("lm_head.weight", "embed_tokens.weight")  # files keep one of them
    for dropped in tied:
        path = tmp_path / "model.safetensors"
        kept = {n: t.clone() for n, t in state.items() if n != dropped}
        save_file(kept, path)
        for size, meta in ((1, False), (3, True), (4, True)):
            for read, limit, _ in world(size).run(load_full, str(path), meta):
                assert read <= limit
    both = {name: tensor.clone() for name, tensor in state.items()}
    save_file(both, path)
    world(2).run(load_full, str(path), True)


def load_wrong(path):
    FullyShardedDataParallel(small()).load_full(path)


@pytest.mark.verifies(FSDP)
def test_a_wrong_file_is_told_by_names_and_shapes(world, tmp_path):
    path = tmp_path / "model.safetensors"
    state = dict(small(width=6).state_dict())
    del state["0.bias"]
    save_file({**state, "extra": torch.ones(2)}, path)
    for match in (
        r"0\.weight: \[6, 3\] in the checkpoint, \[5, 3\] here",
        r"0\.bias: not in the checkpoint",
        r"extra: \[2\] in the checkpoint, not here",
    ):
        refused(world(2), load_wrong, str(path), match=match)
    path.write_bytes(path.read_bytes()[:-9])
    refused(world(2), load_wrong, str(path), match="cannot be read")
    refused(world(2), load_wrong, str(tmp_path / "none"), match="none")
