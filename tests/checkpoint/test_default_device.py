"""Files are read on the CPU, where their checksums are: a default device takes none.

Ranks with a GPU have that as torch's default device; "meta" stands for it here.
"""

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.test_company import save
from xtrain.checkpoint import CheckpointReader, Piece, Shard, read_safetensors


@pytest.mark.verifies("xtrain.checkpoint.reader:CheckpointReader")
def test_a_checkpoint_is_read_under_another_default_device(tmp_path):
    path, data = save(tmp_path, 5, 2.5), torch.empty(3)
    with torch.device("meta"), CheckpointReader(path) as reader:
        reader.verify([])
        reader.read([Piece("weight", (3,), (0,), data)])
    assert data.tolist() == [2.5] * 3


@pytest.mark.verifies("xtrain.checkpoint.bare_file:read_safetensors")
def test_a_published_file_is_read_under_another_default_device(tmp_path):
    state = {"matrix": torch.arange(6.0).view(2, 3), "number": torch.tensor(7.0)}
    save_file(state, tmp_path / "model.safetensors")
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    shards = [Shard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in found.items()]
    with torch.device("meta"):
        read_safetensors(
            tmp_path / "model.safetensors", [(s, {s.name}) for s in shards]
        )
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
