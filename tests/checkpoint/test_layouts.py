"""Any layout loads into any other: rows, columns, flat ranges, uneven, whole."""

import itertools
import math
import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_boxes import cuts_of, shapes
from xtrain.checkpoint import (
    About,
    CheckpointError,
    CheckpointReader,
    Piece,
    Shard,
    latest,
    load_checkpoint,
    save_checkpoint,
    whole,
)
from xtrain.checkpoint.boxes import Box, boxes_of_range
from xtrain.checkpoint.files import write_file
from xtrain.checkpoint.folder import prepare, publish
from xtrain.checkpoint.index import make_index
from xtrain.testing import expect_error

SIZES = 1, 2, 3, 4, 8
SHAPES = {
    "matrix": (5, 7),
    "cube": (3, 4, 5),
    "experts": (8, 2, 3),
    "vector": (6,),
    "one": (1, 1),
    "number": (),
    "none": (0, 3),
}
LAYOUTS = (
    *("rows", "columns", "inner", "flat", "uneven", "flat in columns"),
    *("everywhere", "mixed"),
)


def cuts(length, layout, rank, size):
    """A rank's part of a length; an uneven one is drawn, alike on every rank."""
    if layout == "uneven":
        draw = random.Random(100 * length + size)
        ends = sorted(draw.randint(0, length) for _ in range(size - 1))
        return [0, *ends][rank], [*ends, length][rank]
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


def shard_of(name, full, layout, rank, size):
    """What a rank holds of a tensor in a layout; some hold nothing."""
    if layout == "mixed":
        layout = LAYOUTS[list(SHAPES).index(name) % (len(LAYOUTS) - 1)]
    if layout == "flat in columns" and full.dim():
        return flat_in_columns(name, full, rank, size)
    dim = {"rows": 0, "columns": 1, "inner": 2}.get(layout)
    if layout in ("flat", "uneven"):
        start, stop = cuts(full.numel(), layout, rank, size)
        return Shard(name, full.shape, start, full.flatten()[start:stop].clone())
    if dim is None or full.dim() == 0:  # on every rank
        return whole(name, full.clone())
    dim = min(dim, full.dim() - 1)
    start, stop = cuts(full.shape[dim], layout, rank, size)
    offset = [0] * full.dim()
    offset[dim] = start
    part = full.narrow(dim, start, stop - start).clone()
    return Shard(name, full.shape, tuple(offset), part)


def flat_in_columns(name, full, rank, size):
    """A range of the elements of one of two blocks of columns, on an even number."""
    blocks, dim = 2 - size % 2, full.dim() - 1
    low, high = cuts(full.shape[dim], "columns", rank % blocks, blocks)
    block = full.narrow(dim, low, high - low)
    start, stop = cuts(block.numel(), "flat", rank // blocks, size // blocks)
    box = Box((*[0] * dim, low), tuple(block.shape))
    return Shard(name, full.shape, start, block.flatten()[start:stop].clone(), box)


def fulls(more=0):
    return {
        name: torch.arange(math.prod(shape)).view(shape) + 0.5 + more
        for name, shape in SHAPES.items()
    }


STATE = {"exp_avg": 100, "exp_avg_sq": 200}


def training_of(layout, rank, size, empty=False):
    """Shards of a layout and an AdamW over them; without values if to be loaded."""
    shards = [shard_of(n, t, layout, rank, size) for n, t in fulls().items()]
    for shard in shards:
        shard.tensor.fill_(torch.nan) if empty else None
    optimizer = torch.optim.AdamW([s.tensor for s in shards], lr=0.5 if empty else 0.25)
    if not empty:
        states = {key: fulls(more) for key, more in STATE.items()}
        for shard in shards:
            state = {"step": torch.tensor(3.0, device="cpu")}
            for key, full in states.items():
                part = shard_of(shard.name, full[shard.name], layout, rank, size)
                state[key] = part.tensor
            optimizer.state[shard.tensor] = state
    return shards, optimizer


def save_all(directory):
    """Each layout, and the directories it was saved to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for layout in LAYOUTS:
        path = Path(directory, f"{layout} {size}")
        save_checkpoint(path, 3, *training_of(layout, rank, size), {"epoch": 2})


def load_each(directory, turn):
    """Every checkpoint that is there, each into the next layout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layouts = itertools.islice(itertools.cycle(LAYOUTS), turn, None)
    for path, layout in zip(sorted(Path(directory).iterdir()), layouts, strict=False):
        shards, optimizer = training_of(layout, rank, size, empty=True)
        assert load_checkpoint(path, shards, optimizer) == (3, {"epoch": 2})
        right, filled = training_of(layout, rank, size)
        assert optimizer.param_groups[0]["lr"] == 0.25
        for shard, expected in zip(shards, right, strict=True):
            assert torch.equal(shard.tensor, expected.tensor), (path, layout, shard)
            state = optimizer.state[shard.tensor]
            keys = {"step", *STATE} if math.prod(shard.shape) else {"step"}
            assert state.keys() == keys, (path, layout, shard)
            for key in keys:
                value = filled.state[expected.tensor][key]
                assert torch.equal(state[key], value), (path, layout, key, shard)


@pytest.mark.verifies(
    "xtrain.checkpoint.training_state:save_checkpoint",
    "xtrain.checkpoint.training_state:load_checkpoint",
    "xtrain.checkpoint.files:save_pieces",
    "xtrain.checkpoint.pieces:Shard",
)
def test_any_layout_loads_into_any_other(world, tmp_path):
    for size in SIZES:
        world(size).run(save_all, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == len(SIZES) * len(LAYOUTS)
    for turn, size in enumerate(SIZES):
        world(size).run(load_each, str(tmp_path), turn, timeout=300)


def test_what_every_rank_holds_is_written_once(world, tmp_path):
    world(4).run(save_all, str(tmp_path))
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    for layout in LAYOUTS:
        with CheckpointReader(latest(tmp_path / f"{layout} 4")) as reader:
            ours = [
                n for n in reader.tensors if ":number:" not in n and "random" not in n
            ]
            boxes = [b for n in ours for s in reader.stored(n) for b in s.boxes]
            assert sum(box.numel for box in boxes) == 3 * numel
            if layout == "columns":
                assert len(reader.stored("matrix")) == 4


@settings(max_examples=60, deadline=None)
@given(shape=shapes, data=st.data())
def test_any_cut_is_read_in_any_other(shape, data):
    """Boxes written by some ranks, read as other boxes; a flat range is some boxes."""
    full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    pieces = [
        Piece("x", shape, box.offset, part_of(full, box))
        for box in data.draw(cuts_of(shape))
    ]
    rank_of = data.draw(st.lists(st.integers(0, 2), min_size=7, max_size=7))
    wanted = list(data.draw(cuts_of(shape)))
    ends = sorted(data.draw(st.tuples(*[st.integers(0, full.numel())] * 2)))
    wanted += boxes_of_range(shape, *ends)
    with tempfile.TemporaryDirectory() as directory:
        partial = prepare(Path(directory), 0)
        manifests = []
        for rank in range(3):
            mine = [
                p for p, owner in zip(pieces, rank_of, strict=False) if owner == rank
            ]
            name = f"rank-{rank:05d}.safetensors"
            manifests.append(write_file(partial.path / name, mine))
        with CheckpointReader(publish(partial, make_index(0, {}, manifests))) as reader:
            reader.check({"x": About(shape, torch.float64)})
            into = [Piece("x", shape, b.offset, torch.zeros(b.size)) for b in wanted]
            reader.verify(into)
            reader.read(into)
    for box, piece in zip(wanted, into, strict=True):
        assert torch.equal(piece.data.double(), part_of(full, box))


def part_of(full, box):
    return full[box.slices_in(Box((0,) * full.dim(), full.shape))]


# -- ranks that hold different tensors, or say different things of one


def save_stages(directory):
    """Each rank has a layer of its own, as the stages of a pipeline."""
    rank = dist.get_rank()
    layer = whole(f"layer.{rank}", torch.full((2, 2), float(rank)))
    save_checkpoint(directory, 1, [layer, whole("shared", torch.ones(3))])


def load_stages(directory, names):
    shards = [whole(n, torch.zeros(2, 2)) for n in names[dist.get_rank()]]
    shards.append(whole("shared", torch.zeros(3)))
    try:
        load_checkpoint(directory, shards)
    except CheckpointError as error:
        return str(error)
    return [shard.tensor.flatten()[0].item() for shard in shards]


def test_ranks_may_hold_different_tensors(world, tmp_path):
    world(3).run(save_stages, str(tmp_path))
    names = [["layer.0", "layer.1"], ["layer.2"]]
    assert world(2).run(load_stages, str(tmp_path), names) == [[0, 1, 1], [2, 1]]
    for said in world(2).run(load_stages, str(tmp_path), [["layer.0"], ["layer.2"]]):
        assert "layer.1: [2, 2] in the checkpoint, not here" in said
    names = [["layer.0", "layer.1"], ["layer.2", "layer.3"]]
    for said in world(2).run(load_stages, str(tmp_path), names):
        assert "layer.3: not in the checkpoint, [2, 2] here" in said


def bad_shards(directory, what):
    """Rank 1 hands in something that cannot be."""
    rank = dist.get_rank()
    tensor = torch.zeros(2, 2)
    good = Shard("x", (2, 4), (0, 2 * rank), tensor)
    bad = {
        "outside": Shard("x", (2, 4), (0, 3), tensor),
        "below": Shard("x", (2, 4), (0, -1), tensor),
        "dims": Shard("x", (2, 4), (0,), tensor),
        "flat": Shard("x", (2, 4), 6, torch.zeros(3)),
        "not flat": Shard("x", (2, 4), 4, tensor),
        "name": Shard(":x", (2, 4), (0, 2), tensor),
        "shape": Shard("x", (2, 5), (0, 2), tensor),
        "dtype": Shard("x", (2, 4), (0, 2), tensor.double()),
        "overlap": Shard("x", (2, 4), (0, 1), tensor),
        "gap": Shard("x", (2, 4), (0, 2), tensor[:1]),
        "values": Shard("x", (2, 4), (0, 0), tensor + 1),
        "after the box": Shard("x", (2, 4), 2, torch.zeros(3), Box((0, 2), (2, 2))),
        "box outside": Shard("x", (2, 4), 0, torch.zeros(3), Box((0, 3), (2, 2))),
    }[what]
    load, what = (load_checkpoint, ()) if directory == "" else (save_checkpoint, (1,))
    load(directory, *what, [bad if rank == 1 else good])


NOT_WITHIN = ValueError, r"rank 1: x: a shard of shape .* on is not within \[2, 4\]"
BAD_SHARDS = {
    **dict.fromkeys(("outside", "below", "dims", "flat", "not flat"), NOT_WITHIN),
    "after the box": (ValueError, r"from 2 on is not within \[2, 2\] at \[0, 2\] of"),
    "box outside": (ValueError, r"from 0 on is not within \[2, 2\] at \[0, 3\] of"),
    "name": (ValueError, "rank 1: ':x' is not a name"),
    "shape": (CheckpointError, r"x: shape \[2, 4\] and \[2, 5\] on different ranks"),
    "dtype": (CheckpointError, "x: dtype float32 and float64 on different ranks"),
    "overlap": (CheckpointError, r"x: two pieces have element \[0, 1\]"),
    "gap": (CheckpointError, r"x: element \[1, 2\] is in no piece"),
    "values": (CheckpointError, "x: ranks 0 and 1 hold different values"),
}


def test_shards_that_cannot_be_are_refused_on_every_rank(world, tmp_path):
    for what, (error, match) in BAD_SHARDS.items():
        path = str(tmp_path)
        expect_error(world(2), bad_shards, path, what, error=error, match=match)
        assert latest(tmp_path) is None
    for what in ("outside", "flat", "box outside", "name"):  # before anything is opened
        match = BAD_SHARDS[what][1]
        expect_error(world(2), bad_shards, "", what, match=match)
    for what in ("shape", "dtype"):
        match = "ranks 0 and 1 hold parts of different tensors x"
        expect_error(world(2), bad_shards, "", what, match=match)


def load_frozen(directory):
    """Only one of two tensors is trained; the checkpoint has state of both."""
    rank, size = dist.get_rank(), dist.get_world_size()
    save_checkpoint(directory, 3, *training_of("rows", rank, size))
    dist.barrier()
    shards, _ = training_of("columns", rank, size, empty=True)
    matrix = next(shard.tensor for shard in shards if shard.name == "matrix")
    optimizer = torch.optim.AdamW([matrix])
    load_checkpoint(directory, shards, optimizer)
    assert list(optimizer.state) == [matrix]
    assert optimizer.state[matrix].keys() == {"step", *STATE}
    assert not any(shard.tensor.isnan().any() for shard in shards)


def test_only_what_the_optimizer_steps_gets_state(world, tmp_path):
    world(2).run(load_frozen, str(tmp_path))
