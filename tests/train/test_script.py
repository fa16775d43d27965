"""The script of the page: between layouts only the option `--mesh` differs."""

import pytest
from snippets.lc8.all_together import layout_of, train

from xtrain.cluster import VirtualCluster

MESHES = [
    "",
    "data=2",
    "data=4,zero=1",
    "data=2,zero=2,micro_batches=2",
    "data=8,zero=3",
    "tensor=2",
    "tensor=4,sequence_parallel=1",
    "context=2",
    "context=4,context_way=all_gather",
    "pipeline=2,micro_batches=4",
    "pipeline=4,micro_batches=8,schedule=gpipe",
    "pipeline=2,micro_batches=4,schedule=interleaved,chunks=2",
    "pipeline=2,micro_batches=4,schedule=zb_h1",
    "pipeline=2,micro_batches=4,schedule=zb_v,chunks=2",
    "pipeline=2,data=2,micro_batches=4,schedule=dualpipe,zero=1",
    "pipeline=2,micro_batches=4,schedule=dualpipe_v,chunks=2",
    "data=2,tensor=2,zero=3",
    "data=2,context=2,tensor=2,zero=2",
    "pipeline=2,tensor=2,micro_batches=2",
    "pipeline=2,data=2,tensor=2,micro_batches=2,zero=3",
    "pipeline=2,data=2,context=2,tensor=2,micro_batches=2,zero=3",
]
STEPS = 4


def run(mesh: str, steps: int = STEPS, folder: str | None = None) -> list[float]:
    """On so many virtual ranks as the mesh has."""
    found = VirtualCluster(layout_of(mesh).gpus).run(train, mesh, steps, folder)
    assert all(losses == pytest.approx(found[0], rel=1e-12) for losses in found)
    return found[0]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return run("")


@pytest.mark.parametrize("mesh", MESHES)
def test_only_the_mesh_differs(mesh, alone):
    assert run(mesh) == pytest.approx(alone, rel=1e-9, abs=0)


def test_another_mesh_goes_on_from_a_checkpoint(tmp_path, alone):
    first = run("data=2,zero=3", 2, str(tmp_path))
    rest = run("pipeline=2,micro_batches=2", STEPS, str(tmp_path))
    assert first + rest == pytest.approx(alone, rel=1e-9, abs=0)


def test_experts_have_the_curve_of_one_process_with_experts():
    wide = run("data=2,expert=2,micro_batches=1")
    assert wide == pytest.approx(run("data=4,expert=4"), rel=1e-9, abs=0)
    assert run("data=4,expert=2,zero=1") == pytest.approx(wide, rel=1e-9, abs=0)
