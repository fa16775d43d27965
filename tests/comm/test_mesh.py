"""Device meshes: coordinates, groups, and sizes that do not fit."""

import itertools
import math
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from tests.devices import device_type
from xtrain.comm import axis_ranks, init_mesh, mesh_coordinates, ring_all_reduce
from xtrain.comm.checks import message_device
from xtrain.comm.mesh import check_mesh, joined_group, timeout_of
from xtrain.testing import expect_error

PLACES = "xtrain.comm.mesh:mesh_coordinates", "xtrain.comm.mesh:axis_ranks"
MESHES = {
    1: [((1,), ("data",)), ((1, 1, 1), ("a", "b", "c"))],
    4: [
        ((4,), ("data",)),
        ((2, 2), ("data", "tensor")),
        ((1, 4), ("data", "tensor")),
        ((4, 1), ("data", "tensor")),
        ((2, 1, 2), ("pipeline", "data", "tensor")),
    ],
    6: [((2, 3), ("data", "tensor")), ((3, 2), ("data", "tensor"))],
    8: [((2, 2, 2), ("pipeline", "data", "tensor"))],
}


def same_as_torch(shape, axes) -> None:
    rank = dist.get_rank()
    mesh = init_mesh(shape, axes)
    assert tuple(mesh.shape) == shape
    assert mesh.mesh_dim_names == axes
    assert tuple(mesh.get_coordinate()) == mesh_coordinates(rank, shape)
    for axis, name in enumerate(axes):
        group = mesh[name].get_group()
        members = axis_ranks(rank, shape, axis)
        assert dist.get_process_group_ranks(group) == members
        assert mesh.get_local_rank(name) == mesh_coordinates(rank, shape)[axis]
        tensor = torch.tensor([float(rank)])
        ring_all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)


@pytest.mark.parametrize(
    ("shape", "axes"), [case for cases in MESHES.values() for case in cases], ids=str
)
@pytest.mark.verifies("xtrain.comm.mesh:init_mesh", *PLACES)
def test_coordinates_and_groups_equal_torch(world, shape, axes):
    world(math.prod(shape)).run(same_as_torch, shape, axes)


def where_tensors_are_made() -> list[str]:
    chosen = init_mesh((2,), ("data",)).device_type
    torch.set_default_device("meta")  # as a rank's GPU; it has no numbers
    by_default = init_mesh((2,), ("data",)).device_type
    return [chosen, by_default, init_mesh((2,), ("data",), "cpu").device_type]


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh")
def test_a_mesh_is_of_the_device_where_tensors_are_made(world):
    own = world(2).device
    assert world(2).run(where_tensors_are_made) == [[own, "meta", "cpu"]] * 2


@pytest.mark.verifies(*PLACES)
def mesh_of_a_default_group_for_gpus():
    """As if the default group served GPUs alone: torch is not asked for one."""
    gpu = mock.Mock(return_value=torch.device("cuda"))
    with (
        mock.patch("xtrain.comm.mesh.message_device", gpu),
        mock.patch("xtrain.comm.mesh.init_device_mesh"),
        mock.patch("xtrain.comm.mesh.timeout_of", return_value=None),
    ):
        axes = dist.get_world_size(), 1
        made = init_mesh(axes, ("data", "tensor"))
        return made.device_type, init_mesh(axes, ("a", "b"), "cpu").device_type


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh")
def test_a_mesh_is_of_the_device_of_the_default_group(world):
    assert world(2).run(mesh_of_a_default_group_for_gpus) == [("cuda", "cpu")] * 2


def test_the_last_axis_is_contiguous():
    """Rank 5 of 2 x 4: its tensor group is a row, its data group a column."""
    assert mesh_coordinates(5, (2, 4)) == (1, 1)
    assert axis_ranks(5, (2, 4), 1) == [4, 5, 6, 7]
    assert axis_ranks(5, (2, 4), 0) == [1, 5]


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@pytest.mark.verifies(*PLACES)
@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(shapes)
def test_coordinates_and_axes_of_any_mesh(shape):
    world_size = math.prod(shape)
    table = torch.arange(world_size).view(shape)
    for rank in range(world_size):
        coordinates = mesh_coordinates(rank, shape)
        assert table[coordinates] == rank
        for axis in range(len(shape)):
            place = list(coordinates)
            place[axis] = slice(None)
            assert axis_ranks(rank, shape, axis) == table[tuple(place)].tolist()
    # Every axis cuts the world into groups that share no rank.
    for axis in range(len(shape)):
        cut = {tuple(axis_ranks(rank, shape, axis)) for rank in range(world_size)}
        assert sorted(itertools.chain(*cut)) == list(range(world_size))


@pytest.mark.verifies(*PLACES)
def test_places_outside_the_mesh_are_refused():
    for rank in (-1, 4, 99):
        with pytest.raises(ValueError, match=rf"rank {rank} .* shape \(2, 2\)"):
            mesh_coordinates(rank, (2, 2))
        with pytest.raises(ValueError, match=rf"rank {rank} .* shape \(2, 2\)"):
            axis_ranks(rank, (2, 2), 0)
    for axis in (-1, 2):
        with pytest.raises(ValueError, match=rf"axis {axis} .* shape \(2, 2\)"):
            axis_ranks(0, (2, 2), axis)


WRONG = [
    ((2, 3), ("data", "tensor"), r"2 x 3 = 6 ranks, but the world has 4"),
    ((4, 4), ("data", "tensor"), r"4 x 4 = 16 ranks, but the world has 4"),
    ((2,), ("data",), r"2 = 2 ranks, but the world has 4"),
    ((1,), ("data",), r"but the world has 4"),
    ((2, 2), ("data",), r"one name per axis: shape \(2, 2\), axes \('data',\)"),
    ((2, 2), ("data", "data"), r"one name per axis"),
    ((), (), r"one name per axis"),
    ((0, 4), ("data", "tensor"), r"from 1 up, got \(0, 4\)"),
    ((-2, -2), ("data", "tensor"), r"from 1 up, got \(-2, -2\)"),
    ((2.0, 2), ("data", "tensor"), r"from 1 up, got \(2.0, 2\)"),
]


def wrong_meshes() -> None:
    for shape, axes, message in WRONG:
        with pytest.raises(ValueError, match=message):
            init_mesh(shape, axes)
        with pytest.raises(ValueError, match=message):
            check_mesh(shape, axes, 4)
    tensor = torch.ones(2)
    ring_all_reduce(tensor)
    assert tensor.tolist() == [4.0, 4.0]
    check_mesh((2, 2), ("data", "tensor"), 4)


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh", "xtrain.comm.mesh:check_mesh")
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(world):
    world(4).run(wrong_meshes)


def timeouts() -> None:
    """With a default group that waits 77 seconds."""
    world = dist.group.WORLD._get_backend(message_device(None))
    usual = timeout_of(None)
    world._set_default_timeout(timedelta(seconds=77))
    try:
        for timeout in (None, timedelta(seconds=5)):
            mesh = init_mesh((2, 2), ("data", "context"), timeout=timeout)
            whole = init_mesh((4,), ("data",), timeout=timeout)
            joined = joined_group(mesh, ("data", "context"))
            limit = timeout or timedelta(seconds=77)
            groups = [mesh["data"].get_group(), mesh["context"].get_group()]
            for group in (*groups, whole.get_group()):
                assert timeout_of(group) == limit
            assert joined is joined_group(mesh, ("data", "context"))
            assert dist.get_process_group_ranks(joined) == [0, 1, 2, 3]
            assert timeout_of(joined) == limit
            assert timeout_of(None) == timedelta(seconds=77)
        half = init_mesh((2, 2, 1), ("pipeline", "data", "context"), timeout=timeout)
        joined, first = joined_group(half, ("data", "context")), dist.get_rank() // 2
        assert dist.get_process_group_ranks(joined) == [2 * first, 2 * first + 1]
        assert timeout_of(joined) == timeout
    finally:
        world._set_default_timeout(usual)


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh", "xtrain.comm.mesh:joined_group")
def test_groups_of_a_mesh_have_the_timeout_given_or_that_of_the_default_group(world):
    world(4).run(timeouts)


def joined_beside_others(shape) -> None:
    """Ranks 0 and 1 hold a group more than the others, before and after a destroy."""
    dist.new_group([0, 1])
    for axes in [("data", "tensor"), ("tensor", "context"), ("data", "context")] * 2:
        mesh = init_mesh(shape, ("data", "tensor", "context"))
        joined = joined_group(mesh, axes)
        same = next(axis for axis in mesh.mesh_dim_names if axis not in axes)
        place = mesh.get_coordinate()[mesh.mesh_dim_names.index(same)]
        expected = mesh.mesh.select(mesh.mesh_dim_names.index(same), place).flatten()
        assert dist.get_process_group_ranks(joined) == expected.tolist()
        total = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(total, group=joined)
        assert total.item() == sum(2.0**rank for rank in expected.tolist())
        dist.destroy_process_group(joined)


@pytest.mark.verifies("xtrain.comm.mesh:joined_group", "xtrain.comm.mesh:groups_along")
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 1, 2), (1, 3, 2), (2, 2, 2)])
def test_axes_are_joined_on_ranks_that_hold_other_numbers_of_groups(world, shape):
    world(math.prod(shape)).run(joined_beside_others, shape)


def joined_by_members(more: list[int]) -> list[int]:
    """A mesh of ranks 1 to 4 of five, of which some hold a group more."""
    ranks = torch.arange(1, 5).view(2, 2)
    mesh = DeviceMesh(device_type(), ranks, mesh_dim_names=("data", "context"))
    for rank in more:
        dist.new_group([rank])
    if mesh.get_coordinate() is None:
        return [1, 2, 3, 4]
    joined = joined_group(mesh, ("data", "context"))
    return dist.get_process_group_ranks(joined)


def refused_by_members(more: list[int]) -> None:
    if dist.get_rank() == 0:
        joined_by_members(more)
        return
    with pytest.raises(ValueError, match=r"ranks \[1, 2, 3, 4\] hold \d+ to \d+ "):
        joined_by_members(more)


@pytest.mark.verifies("xtrain.comm.mesh:group_of_members")
def test_members_make_a_group_if_they_hold_equally_many(world):
    assert world(5).run(joined_by_members, [0]) == [[1, 2, 3, 4]] * 5
    for more in ([1], [4], [2, 3]):
        world(5).run(refused_by_members, more)


def refused_timeout() -> None:
    init_mesh((2,), ("data",), timeout=5)  # type: ignore[arg-type]


@pytest.mark.verifies("xtrain.comm.mesh:check_timeout")
def test_a_timeout_that_is_no_time_is_refused(world):
    expect_error(world(2), refused_timeout, match="timeout is a timedelta above 0")
