"""Each wrapper over data ranks of a cut model: it trains as one process does."""

import pytest
import torch

from tests.model.mesh_training import (
    WRAPPERS,
    Layout,
    MeshTraining,
    check_training,
    one_process,
)

VERIFIED = (
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.loss:mean_cross_entropy",
    "xtrain.data_parallel.ddp:DistributedDataParallel",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
KEYS = {"num_key_value_heads": 2}
EPS = 0.01
MESHES = {"1x2": (1, 2), "2x1": (2, 1), "1x4": (1, 4), "2x2": (2, 2), "3x1": (3, 1),
          "4x1": (4, 1)}  # fmt: skip


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("accumulate", [1, 2], ids=["at once", "accumulated"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_wrapper_trains_on_every_mesh(world, mesh, accumulate):
    """Uneven numbers of labels by rank; the first micro-batch is in `no_sync`."""
    options = {"micro_batches": accumulate}
    cuts = (False, True) if MESHES[mesh][1] > 1 else (False,)
    runs = [
        (Layout(wrapper, *MESHES[mesh]), options | {"sequence_parallel": cut})
        for wrapper in WRAPPERS
        for cut in cuts
    ]
    check_training(world, runs, KEYS)


def in_sixteen_bits(mesh, low, expected, start):
    """Errors of the weights as shares of how far training has moved them."""
    found = {}
    for wrapper in WRAPPERS:
        layout = Layout(wrapper, *mesh)
        run = MeshTraining(layout, KEYS, torch.float32, low, eps=EPS)
        run.train(0, 3)
        for name, weight in run.weights().items():
            place = run.bare.placement(name)
            right, before = place.of(expected[name]), place.of(start[name])
            error = (weight.double() - right).norm() / (right - before).norm()
            found[wrapper] = max(error.item(), found.get(wrapper, 0.0))
    return found


@pytest.mark.verifies(*VERIFIED, "xtrain.zero.mixed_precision:MixedPrecisionOptimizer")
@pytest.mark.parametrize("mesh", ["1x4", "2x2"])
def test_sixteen_bit_weights_with_masters_train_on_a_mesh(world, mesh):
    """Up to the rounding of bf16; with this eps a step is no sign of a gradient."""
    (expected, *_), (start, *_) = (one_process(KEYS, n, eps=EPS) for n in (3, 0))
    arguments = MESHES[mesh], torch.bfloat16, expected, start
    for errors in world(4).run(in_sixteen_bits, *arguments):
        assert max(errors.values()) < 0.25, errors
