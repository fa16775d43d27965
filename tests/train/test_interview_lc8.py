"""Claims of the interview page of lc8, each run with and without its cause."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.model.twins import batch, config_of
from tests.train.test_checkpoints import check
from tests.train.test_layouts import DENSE, EXPERTS
from xtrain.cluster import VirtualCluster
from xtrain.model import XtrainModel
from xtrain.plan import Layout, daly_interval, goodput, time_between_failures
from xtrain.train.layouts import axes_of, make_mesh, wrapped_model
from xtrain.train.steps import accumulate

MESH = "xtrain.train.layouts:make_mesh"
WRAPPED = "xtrain.train.layouts:wrapped_model"
STEPS = ("xtrain.train.steps:of_one_model", "xtrain.train.steps:weights")

# ---------------------------------------------------------------- groups: their ranks


def groups_of(rank: int, size: int, layout: Layout) -> dict[str, list[int]]:
    mesh = make_mesh(layout)
    return {
        axis: dist.get_process_group_ranks(mesh[axis].get_group())
        for axis in axes_of(layout)
    }


@pytest.mark.verifies(MESH)
def test_the_group_of_an_axis_varies_one_coordinate_and_tensor_ranks_are_neighbours():
    layout = Layout(pipeline=2, data=2, tensor=4, micro_batches=2)
    found = VirtualCluster(16).run(groups_of, layout)
    assert found[0]["tensor"] == [0, 1, 2, 3]
    assert found[0]["data"] == [0, 4]
    assert found[0]["pipeline"] == [0, 8]
    places = torch.arange(16).reshape(2, 2, 1, 4)
    for rank, groups in enumerate(found):
        at = (places == rank).nonzero()[0].tolist()
        for dim, axis in enumerate(("pipeline", "data", "context", "tensor")):
            line = [slice(None) if d == dim else at[d] for d in range(4)]
            assert groups[axis] == places[tuple(line)].tolist(), (rank, axis)


# ------------------------------------------------------------- batch: who reads what


def share_of(rank: int, size: int, layout: Layout) -> tuple[int, int]:
    shape = EXPERTS if layout.expert > 1 else DENSE
    group = wrapped_model(config_of(**shape), layout).data_group
    return group.rank(), group.size()


@pytest.mark.verifies(WRAPPED)
def test_the_batch_is_chosen_by_the_rank_in_the_data_group():
    layout = Layout(pipeline=2, data=2, tensor=2, micro_batches=2)
    found = VirtualCluster(8).run(share_of, layout)
    assert [share for share, _ in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {size for _, size in found} == {2}
    layout = Layout(data=4, expert=2, context=2)
    found = VirtualCluster(8).run(share_of, layout)  # expert ranks are data ranks
    assert [share for share, _ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.batch == 4 == Layout(data=4, tensor=8, pipeline=2).batch


# ------------------------------------------------------------- start: initial weights


def slices_of_the_whole(layout: Layout) -> int:
    """How many parameters this rank has compared with rank 0's, to the last bit."""
    torch.manual_seed(dist.get_rank())  # which no weight is drawn from
    whole = XtrainModel(config_of(**DENSE), dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in whole.named_parameters()}
    for weight in weights.values():
        dist.broadcast(weight, 0)
    model = wrapped_model(config_of(**DENSE), layout, dtype=torch.float64)
    found = list(model.named_parameters())
    for name, weight in found:
        assert torch.equal(weight, model.placement(name).of(weights[name])), name
    return len(found)


@pytest.mark.verifies(WRAPPED)
@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(pipeline=2, tensor=2, micro_batches=2), Layout(data=3)],
    ids=str,
)
def test_every_layout_begins_with_slices_of_the_same_weights(world, layout):
    assert min(world(layout.gpus).run(slices_of_the_whole, layout)) > 0


# ------------------------------------------------------- sums: an axis that is left out


def losses_and_norms(layout, skip, dtype, steps):
    """Steps of SGD; the losses, and the norm of the embedding's gradient."""
    model = wrapped_model(config_of(**DENSE), layout, dtype=dtype)
    (part,), found = model.parts, []
    part.sync_gradients = partial(part.sync_gradients, skip=skip)
    for step in range(steps):
        model.zero_grad()
        rank = model.data_group.rank()
        rows = [t[rank :: layout.data] for t in batch(step, rows=8)]
        loss = accumulate(model, *rows, micro_batches=layout.micro_batches)
        found.append((loss.item(), part.embed_tokens.weight.grad.norm().item()))
        with torch.no_grad():
            for weight in part.parameters():
                weight -= 0.1 * weight.grad
    return found


def train(world, layout=None, skip=(), dtype=torch.float64, steps=3):
    layout = layout or Layout(micro_batches=1)
    return world(layout.gpus).run(losses_and_norms, layout, skip, dtype, steps)


@pytest.mark.verifies(WRAPPED, *STEPS)
@pytest.mark.parametrize("axis", ["data", "context"])
def test_a_sum_that_is_left_out_leaves_the_first_loss_right_and_no_gradient(
    world, axis
):
    (right,) = train(world)
    layout = Layout(data=2, context=2)
    for found in train(world, layout):
        assert found == [pytest.approx(one, rel=1e-9) for one in right]
    for found in train(world, layout, skip=(axis,)):
        assert found[0][0] == pytest.approx(right[0][0], rel=1e-12)
        assert found[0][1] != pytest.approx(right[0][1], rel=0.05)
        assert found[2][0] != pytest.approx(right[2][0], rel=1e-4)


@pytest.mark.verifies(WRAPPED)
def test_layouts_differ_by_rounding_and_float64_tells_it_from_a_bug(world):
    """Four digits are no proof in float32; eleven are one in float64."""
    layout, apart = Layout(data=2, context=2), {}
    for dtype in (torch.float32, torch.float64):
        (alone,) = train(world, dtype=dtype, steps=6)
        found = train(world, layout, dtype=dtype, steps=6)[0]
        apart[dtype] = max(
            abs(a - b) / b for (a, _), (b, _) in zip(found, alone, strict=True)
        )
    assert 1e-8 < apart[torch.float32] < 1e-3
    assert apart[torch.float64] < 1e-11


# ------------------------------------------------------------- nodes: fewer data ranks


@pytest.mark.verifies("xtrain.train.checkpoints:save", "xtrain.train.checkpoints:load")
def test_three_data_ranks_go_on_with_the_batch_of_four(world, tmp_path):
    """Eight sequences are 2, 2, 2, 2 and then 3, 3, 2."""
    pair = Layout(data=4, zero=3), Layout(data=3, zero=3)
    check(world, pair, DENSE, str(tmp_path))


# ---------------------------------------------------------------- jobs: checkpoints


@pytest.mark.parametrize("gpus", [64, 1024, 16384])
def test_the_interval_is_flat_around_its_optimum(gpus):
    """Half and twice as often keep the same share of the time, within 4 % of it."""
    failures = time_between_failures(gpus)
    best = daly_interval(60, failures)
    kept = [goodput(times * best, 60, failures, 600) for times in (0.1, 0.5, 1, 2, 10)]
    assert max(kept) == kept[2]
    assert min(kept[1], kept[3]) > 0.96 * kept[2]
    lost = [1 - share / kept[2] for share in kept]
    assert min(lost[0], lost[4]) > 4 * max(lost[1], lost[3])
