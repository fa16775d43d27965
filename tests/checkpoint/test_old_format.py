"""A checkpoint of format 1, written before pieces had dims, loads as it always did.

`format_1` was written on two ranks by a FullyShardedDataParallel around `Shapes` and an
AdamW: weights i + 0.5 for element i, first moments 100 more, second moments 200 more,
step 3, and the random state of the seed that is the rank.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.crafted import change_index, pieces, update
from tests.checkpoint.test_layouts import LAYOUTS, shard_of
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    latest,
    load_checkpoint,
    whole,
)
from xtrain.zero import AdamW, FullyShardedDataParallel, ZeroOptimizer

RUN = Path(__file__).parent / "format_1"
SHAPES = {
    "cube": (2, 3, 5),
    "vector": (7,),
    "none": (0, 3),
    "number": (),
    "matrix": (5, 3),
}
DTYPES = {"matrix": torch.float64}


def values(name):
    shape = SHAPES[name]
    count = torch.arange(torch.Size(shape).numel(), dtype=DTYPES.get(name))
    return count.view(shape) + 0.5


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        for name in SHAPES:
            setattr(self, name, nn.Parameter(torch.zeros_like(values(name))))
        self.register_buffer("count", torch.tensor(0))


def load_into(kind):
    """Load into a wrapper; what it holds then, and state that is its weights + 100."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Shapes()
    if kind == "fsdp":
        model = FullyShardedDataParallel(module)
        optimizer = AdamW(model.parameters())
        result = model.load_sharded(RUN, optimizer)
        stepped, weights = list(model.parameters()), model.full_state_dict()
    elif kind == "zero":
        zero = ZeroOptimizer(module.parameters(), AdamW, lr=0.5)
        result = zero.load_sharded(RUN, module)
        optimizer, weights = zero.optimizer, module.state_dict()
        stepped = [b.master for b in zero.buckets]
    else:
        shards = [
            shard_of(name, torch.zeros_like(values(name)), kind, rank, size)
            for name in SHAPES
        ]
        optimizer = AdamW([s.tensor for s in shards])
        count = whole("count", torch.tensor(0))
        result = load_checkpoint(RUN, [*shards, count], optimizer)
        assert count.tensor == 41
        stepped, weights = [s.tensor for s in shards], {}
        for shard in shards:
            right = shard_of(shard.name, values(shard.name), kind, rank, size)
            assert torch.equal(shard.tensor, right.tensor)
    assert result == (3, {"epoch": 2})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    for tensor in stepped:
        state = optimizer.state[tensor]
        assert state["step"] == 3
        for key, more in ("exp_avg", 100), ("exp_avg_sq", 200):
            if key in state:  # of what has no elements there is only the step
                filled = tensor.detach() != 0  # not the padding of the last shard
                assert torch.equal(state[key][filled], (tensor.detach() + more)[filled])
                assert state[key].shape == tensor.shape
    for name in SHAPES if weights else ():
        assert torch.equal(weights[name], values(name))
    drawn = torch.rand(2, device="cpu")
    seeded = torch.rand(2, generator=torch.Generator().manual_seed(rank), device="cpu")
    assert torch.equal(drawn, seeded) == (size == 2)
    return weights.get("count")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.verifies("xtrain.checkpoint.structure:stored_pieces")
def test_an_old_checkpoint_loads_into_every_layout(world, size):
    for kind in ("fsdp", "zero", *LAYOUTS):
        for count in world(size).run(load_into, kind):
            assert count in (None, 41)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    return latest(tmp_path / "run")


def check(path):
    with CheckpointReader(path) as reader:
        reader.verify([])


def ranges(name, *places):
    """Other places of the first pieces; the rest is removed."""

    def edit(found):
        found[:] = [
            [*place, *old[2:]] for place, old in zip(places, found, strict=False)
        ]

    return pieces(name, edit)


CRAFTED = {
    "no pieces": (ranges("cube"), "cube: elements from 0 on"),
    "a first piece missing": (ranges("cube", (19, 30)), "cube: elements 0 to 19"),
    "a last piece missing": (ranges("cube", (0, 19)), "cube: elements from 19 on"),
    "a gap": (ranges("cube", (0, 18), (19, 30)), "cube: elements 18 to 19"),
    "beyond the end": (ranges("cube", (0, 19), (19, 31)), "elements 19 to 31 of 30"),
    "no elements": (ranges("cube", (0, 30), (30, 30)), "elements 30 to 30 of 30"),
    "below 0": (ranges("cube", (-1, 19), (19, 30)), "elements -1 to 19"),
    "no int": (ranges("cube", (0, 19.0), (19, 30)), r"elements 0 to 19\.0"),
    "a bool": (ranges("cube", (False, 19), (19, 30)), "elements False to 19"),
    "lists": (ranges("cube", ([0], [19]), (19, 30)), r"elements \[0\] to \[19\]"),
    "longer": (ranges("cube", (0, 20), (19, 30)), r"shape \[19\] in the file"),
    "another start": (ranges("cube", (0, 19), (18, 30)), "it has other tensors"),
    "another checksum": (
        pieces("cube", lambda found: found[0].__setitem__(3, 5)),
        r"cube, from \[0, 0, 0\] to \[2, 1, 4\]: wrong checksum",
    ),
    "format 2": (update(format=2), "size .* at .*: no numbers"),
}


@pytest.mark.parametrize("what", CRAFTED)
@pytest.mark.verifies("xtrain.checkpoint.structure:check_structure")
def test_an_old_index_that_could_be_misread_is_refused(copy, what):
    check(copy)
    change, match = CRAFTED[what]
    assert json.loads((copy / "index.json").read_text())["format"] == 1
    change_index(copy, change)
    with pytest.raises(CheckpointError, match=match):
        check(copy)


def test_flipped_bits_of_an_old_checkpoint_are_found(copy):
    for file in copy.glob("rank-*"):
        good = file.read_bytes()
        start = 8 + int.from_bytes(good[:8], "little")
        for place in range(start, len(good), 97):
            data = bytearray(good)
            data[place] ^= 1 << place % 8
            file.write_bytes(data)
            with pytest.raises(CheckpointError, match="wrong checksum"):
                check(copy)
        file.write_bytes(good)
    check(copy)
