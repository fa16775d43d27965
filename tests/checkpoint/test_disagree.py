"""Ranks that find different things: one checkpoint on all of them, or one error.

Each rank has a copy of the run of its own here, as on a file system that shows some
hosts an older state than others.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.crafted import change_index, drop
from tests.checkpoint.test_checkpoint import Run, load_small, refused, save_small, small
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    CheckpointReplaced,
    bare_file,
    latest,
)
from xtrain.checkpoint.folder import pointer_to
from xtrain.cluster.per_rank import replaced
from xtrain.comm.agreement import raising_everywhere, with_ranks
from xtrain.testing import expect_error
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    ZeroOptimizer,
    fsdp_checkpoint,
)
from xtrain.zero.fsdp_checkpoint import aliases_in

OLD, NEW = "step-00000001", "step-00000002"
SIZE = 3


@pytest.fixture
def copies(world, tmp_path):
    """A run with two checkpoints, once for each rank."""
    for step in (1, 2):
        world(2).run(save_small, str(tmp_path / "0"), step)
    for rank in range(1, SIZE):
        shutil.copytree(tmp_path / "0", tmp_path / str(rank))
    return tmp_path


def load_own(directory, stage):
    """Load this rank's copy: the step, or the kind of error and what it says."""
    run = Path(directory) / str(dist.get_rank())
    try:
        if stage == 3:
            return load_small(run)[0]
        model = small(dist.get_rank())
        optimizer = ZeroOptimizer(model.parameters(), AdamW, stage)
        return optimizer.load_sharded(run, model)[0]
    except CheckpointError as error:
        return type(error).__name__, str(error)


def on_all(world, copies, stage=3):
    """What every rank was told."""
    first, *others = world(SIZE).run(load_own, str(copies), stage)
    assert all(other == first for other in others), (first, others)
    return first


def point(run, name):
    (run / "latest").write_text(pointer_to(name))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.verifies(
    "xtrain.checkpoint.opening:open_everywhere", "xtrain.checkpoint.reader:open_same"
)
def test_ranks_load_what_rank_0_finds_or_nothing(world, copies, stage):
    assert on_all(world, copies, stage) == 2

    point(copies / "1", OLD)  # a stale `latest`, but what rank 0 has is there
    assert on_all(world, copies, stage) == 2
    (copies / "1" / "latest").write_text("rubbish")
    assert on_all(world, copies, stage) == 2
    (copies / "1" / "latest").unlink()
    assert on_all(world, copies, stage) == 2

    point(copies / "1", OLD)
    os.rename(copies / "1" / NEW, copies / "hidden")  # what rank 0 has is not there yet
    kind, said = on_all(world, copies, stage)
    assert kind == "CheckpointError"
    assert "ranks 0 and 1 load different checkpoints" in said
    assert str(copies / "0" / NEW) in said and str(copies / "1" / OLD) in said
    (copies / "1" / "latest").unlink()
    kind, said = on_all(world, copies, stage)
    assert f"rank 1: {copies / '1'} is not a checkpoint: it has no index.json" in said
    os.rename(copies / "hidden", copies / "1" / NEW)

    point(copies / "0", OLD)  # rank 0's answer, though the others know of a later one
    assert on_all(world, copies, stage) == 1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.verifies("xtrain.comm.agreement:raising_everywhere")
def test_what_one_rank_cannot_read_is_told_to_all(world, copies, stage):
    (copies / "0" / "latest").write_text("step-0000000")
    said = on_all(world, copies, stage)[1]
    assert f"rank 0: {copies / '0' / 'latest'} is damaged" in said
    point(copies / "0", NEW)

    index = copies / "2" / NEW / "index.json"
    right = index.read_text()
    for key in ("files", "extra", "format"):
        why = "has format None" if key == "format" else f"it has no {key}"
        index.write_text(right)
        change_index(index.parent, drop(key))
        kind, said = on_all(world, copies, stage)
        assert kind == "CheckpointError"
        assert said.startswith("rank 2: ") and str(index) in said and why in said
    index.write_text(right)
    (copies / "1" / NEW / "rank-00001.safetensors").unlink()
    said = on_all(world, copies, stage)[1]
    assert "rank 1: " in said and "no file found" in said
    for rank in (1, 0):
        shutil.rmtree(copies / f"{rank}")
        said = on_all(world, copies, stage)[1]
        assert f"rank {rank}: {copies / str(rank)} is not a checkpoint" in said


def vanish(directory, at):
    """Rank 1's copy is deleted while it is read for the first or second time."""
    mine = Path(directory) / str(dist.get_rank())
    original = getattr(CheckpointReader, at)

    def delete_first(self, *arguments):
        if dist.get_rank() == 1:
            shutil.rmtree(self.path)
        return original(self, *arguments)

    with replaced(CheckpointReader, at, delete_first):
        try:
            load_small(mine)
        except CheckpointReplaced as error:
            return str(error)
    return "loaded"


@pytest.mark.parametrize("at", ["verify", "read"])
def test_a_checkpoint_that_vanishes_on_one_rank_can_be_loaded_again(world, copies, at):
    for said in world(SIZE).run(vanish, str(copies), at):
        assert said.startswith("rank 1: ") and "load again" in said
    shutil.copytree(copies / "0" / NEW, copies / "1" / NEW)
    assert on_all(world, copies) == 2


def no_longer_fits(directory):
    """Something that no check has foreseen goes wrong, on one rank only."""
    original = CheckpointReader.check

    def check(self, *arguments, **options):
        if dist.get_rank() == 2:
            raise KeyError("surprise")
        original(self, *arguments, **options)

    with replaced(CheckpointReader, "check", check):
        return load_own(directory, 3)


def test_any_exception_of_one_rank_is_an_error_on_all(world, copies):
    for kind, said in world(SIZE).run(no_longer_fits, str(copies)):
        assert (kind, said) == ("CheckpointError", "rank 2: KeyError: 'surprise'")


def replaced_here_damaged_there(both):
    rank, kinds = dist.get_rank(), (CheckpointReplaced, CheckpointError)
    with raising_everywhere(*kinds, group=None, what="Not loaded: "):
        if rank == 0:
            raise CheckpointReplaced("gone")
        if rank == 1 and both:
            raise CheckpointError("damaged")


def test_loading_again_is_offered_only_where_it_can_help(world):
    for both, text in (False, "rank 0: gone"), (True, "rank 0: gone; rank 1: damaged"):
        for error in refused(world(3), replaced_here_damaged_there, both):
            assert isinstance(error, CheckpointReplaced) != both
            assert str(error).splitlines()[0] == f"Not loaded: {text}"


def test_a_problem_is_said_once_with_the_ranks_that_have_it():
    assert with_ranks(["a", "a"]) == "a"
    assert with_ranks(["a"]) == "a"
    assert with_ranks([None, "a"]) == "rank 1: a"
    assert with_ranks(["a", "b", "a"]) == "ranks 0, 2: a; rank 1: b"


# -- saving


def fail_then_save(directory):
    """A load's error lives on, and with it all that the load's frames refer to."""
    save_small(directory, 1)
    try:
        load_small(directory, width=6)
    except CheckpointError as error:
        kept = error
    save_small(directory, 1)
    dist.barrier()
    return len(list(Path(directory).glob("step-*"))), str(kept)


def test_a_load_that_failed_does_not_hold_its_checkpoint(world, tmp_path):
    for count, said in world(2).run(fail_then_save, str(tmp_path)):
        assert count == 1 and "of another model" in said


def save_from_elsewhere(directory):
    """A relative path, and rank 1 works in another directory."""
    rank, before = dist.get_rank(), os.getcwd()
    os.chdir(Path(directory) / ("b" if rank == 1 else "a"))
    try:
        save_small("run", 3)
    finally:
        os.chdir(before)


@pytest.mark.processes("each rank works in a folder of its own")
def test_a_rank_that_cannot_write_to_the_folder_is_named_on_all(world, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    match = "step 3 was not saved in run: rank 1: .*No such file"
    refused(world(3), save_from_elsewhere, str(tmp_path), match=match)
    assert latest(tmp_path / "a" / "run") is None
    assert [p.name for p in (tmp_path / "a" / "run").iterdir()] == [".lock"]
    assert list((tmp_path / "b").iterdir()) == []  # no folder of its own either


def foreign_module(directory, save):
    """Rank 1 hands over a module that the optimizer knows nothing of."""
    model = small()
    optimizer = ZeroOptimizer(model.parameters(), AdamW)
    module = small() if dist.get_rank() == 1 else model
    if save:
        optimizer.save_sharded(directory, 1, module)
    else:
        optimizer.load_sharded(directory, module)


@pytest.mark.parametrize("save", [True, False])
def test_a_module_of_others_on_one_rank_is_an_error_on_all(world, tmp_path, save):
    match = "rank 1: 4 parameters of the optimizer are not of module"
    expect_error(world(2), foreign_module, str(tmp_path), save, match=match)


# -- a bare model's file


class Kinds(nn.Module):
    def __init__(self, weight, number, count):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), 1 / 3, dtype=weight))
        self.number = nn.Parameter(torch.tensor(1 / 3, dtype=number))
        self.register_buffer("count", torch.tensor(5, dtype=count))


def load_kinds(path, kinds):
    bare = Kinds(*kinds)
    with torch.no_grad():
        for tensor in (*bare.parameters(), *bare.buffers()):
            tensor.zero_()
    model = FullyShardedDataParallel(bare)
    try:
        if path.endswith(".safetensors"):
            model.load_full(path)
        else:
            model.load_sharded(path)
    except CheckpointError as error:
        return str(error)
    return model.full_state_dict()


def save_kinds(directory, kinds):
    FullyShardedDataParallel(Kinds(*kinds)).save_sharded(directory, 1)


@pytest.mark.verifies(
    "xtrain.checkpoint.bare_file:read_safetensors", "xtrain.checkpoint.index:compare"
)
def test_only_floating_point_is_converted(world, tmp_path):
    """In a bare model's file and in a checkpoint; to the nearest value, and by name."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    count = torch.int64
    kinds = single, double, count
    file, run = str(tmp_path / "model.safetensors"), str(tmp_path / "run")
    save_file(dict(Kinds(*kinds).state_dict()), file)
    world(2).run(save_kinds, run, kinds)
    for path in (file, run):
        for other in (kinds, (half, single, count), (double, half, count)):
            for state in world(2).run(load_kinds, path, other):
                for name, dtype, stored in zip(
                    ("weight", "number"), other, kinds, strict=False
                ):
                    expected = torch.tensor(1 / 3, dtype=stored).to(dtype)
                    assert state[name].dtype == dtype
                    assert state[name].eq(expected).all()
                assert state["count"] == 5
        for other in (torch.int32, torch.float32, torch.bool):
            for said in world(2).run(load_kinds, path, (single, double, other)):
                assert f"count: torch.int64 in the checkpoint, {other} here" in said


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


def ordered_by_rank(module):
    """The order of a set's elements differs from process to process."""
    reverse = dist.get_rank() == 1
    aliases = aliases_in(module).items()
    return {name: sorted(names, reverse=reverse) for name, names in aliases}


def load_tied(path):
    model = FullyShardedDataParallel(Tied())
    with replaced(fsdp_checkpoint, "aliases_in", ordered_by_rank):
        model.load_full(path)
    return model.full_state_dict()["one.weight"]


def test_of_tied_weights_all_ranks_read_the_same_one(world, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"one.weight": torch.ones(3, 3), "two.weight": torch.zeros(3, 3)}, path)
    for weight in world(3).run(load_tied, str(path)):
        assert weight.eq(1).all()


def test_a_file_that_holds_anything_is_read_or_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(())}, path)
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            bare_file.check_safetensors(path, [])
    path.write_bytes(good)
    with pytest.raises(CheckpointError, match=r"a: \[2\] in the checkpoint, not here"):
        bare_file.check_safetensors(path, [])
    with pytest.raises(CheckpointError, match="cannot be read"):
        bare_file.check_safetensors(tmp_path, [])


# -- what a load leaves alone


def load_elsewhere(directory):
    model = FullyShardedDataParallel(small())
    torch.manual_seed(99 + dist.get_rank())
    before = torch.get_rng_state()
    model.load_sharded(directory)
    return torch.equal(torch.get_rng_state(), before)


def save_seeded(directory):
    torch.manual_seed(dist.get_rank())
    save_small(directory, 1)


@pytest.mark.verifies("xtrain.checkpoint.training_state:load_state")
def test_another_number_of_ranks_draws_its_own_random_numbers(world, tmp_path):
    world(2).run(save_seeded, str(tmp_path))
    assert world(2).run(load_elsewhere, str(tmp_path)) == [False] * 2
    for size in (1, 3):
        assert world(size).run(load_elsewhere, str(tmp_path)) == [True] * size


def state_names(directory, stage, amsgrad):
    """Names of the optimizer's state before and after a load."""
    run = Run(stage, seed=3, lr=0.1)
    inner = run.optimizer if stage == 3 else run.optimizer.optimizer
    for group in inner.param_groups:
        group["amsgrad"] = amsgrad
    run.train(0, 1)
    names = [{key for state in inner.state.values() for key in state}]
    if not amsgrad:
        run.save(directory, 1)
    else:
        run.load(directory)
        names.append({key for state in inner.state.values() for key in state})
        run.train(1, 2)
    return names


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.verifies("xtrain.checkpoint.optimizer_state:saved_state")
def test_state_that_the_checkpoint_has_not_is_gone(world, tmp_path, stage):
    world(2).run(state_names, str(tmp_path), stage, False)
    for before, after in world(2).run(state_names, str(tmp_path), stage, True):
        assert before == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert after == {"step", "exp_avg", "exp_avg_sq"}


def save_uneven_steps(directory):
    """As if some parameters had got no gradient in some steps."""
    model = FullyShardedDataParallel(small())
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    for number, piece in enumerate(model.parameters()):
        if piece in optimizer.state:
            optimizer.state[piece]["step"].fill_((3, 7, 5, 1)[number])
    model.save_sharded(directory, 1, optimizer)


def load_as_one(directory):
    model = small()
    optimizer = ZeroOptimizer(model.parameters(), AdamW)
    optimizer.load_sharded(directory, model)
    (bucket,) = optimizer.buckets
    return optimizer.optimizer.state[bucket.master]["step"].item()


def test_a_bucket_takes_the_largest_of_its_parameters_step_counts(world, tmp_path):
    world(2).run(save_uneven_steps, str(tmp_path))
    assert world(2).run(load_as_one, str(tmp_path)) == [7, 7]


def learning_rates(directory):
    model = FullyShardedDataParallel(small())
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.75))
    model.save_sharded(directory, 1, optimizer)
    rate.fill_(3.0)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    model.load_sharded(directory, optimizer)
    (group,) = optimizer.param_groups
    assert group["lr"] is rate  # whoever else holds it sees the change
    return rate.item(), group["betas"]


def load_no_number(directory):
    model = FullyShardedDataParallel(small())
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    optimizer.param_groups[0]["lr"] = "fast"
    model.save_sharded(directory, 2, optimizer)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    try:
        model.load_sharded(directory, optimizer)
    except CheckpointError as error:
        assert rate == 0.5
        return str(error)
    return None


@pytest.mark.verifies("xtrain.checkpoint.optimizer_state:load_groups")
def test_an_option_that_is_a_tensor_is_filled(world, tmp_path):
    for found in world(2).run(learning_rates, str(tmp_path)):
        assert found == (0.25, (0.5, 0.75))
    for said in world(2).run(load_no_number, str(tmp_path)):
        assert "has lr='fast', the optimizer a tensor" in said


def save_odd_name(directory):
    model = FullyShardedDataParallel(small())
    optimizer = AdamW(model.parameters())
    if dist.get_rank() == 1:
        piece = next(p for p in model.parameters() if p.numel())
        optimizer.state[piece] = {"a:b": torch.zeros_like(piece)}
    model.save_sharded(directory, 0, optimizer)


def test_a_state_whose_name_could_be_misread_is_not_saved(world, tmp_path):
    match = "rank 1: .* has state 'a:b'"
    expect_error(world(2), save_odd_name, str(tmp_path), match=match)
