"""Python objects as messages."""

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import (
    all_gather_object,
    broadcast_object,
    debug_checks,
    recv_object,
    send_object,
)

SYMBOLS = [
    f"xtrain.comm.objects:{name}_object"
    for name in ("send", "recv", "broadcast", "all_gather")
]
OBJECTS = [
    None,
    0,
    "naïve 🙂",
    b"",
    {"a": [1, (2, 3)], 4: {5}},
    list(range(1000)),
    float("inf"),
    "x" * 300_000,
]


def transport() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for case, obj in enumerate(OBJECTS):
        if size > 1:
            if rank == 0:
                send_object(obj, right)
                assert recv_object(group_src=left) == obj
            else:
                got = recv_object(left)
                assert got == obj
                send_object(got, group_dst=right)
        root = case % size
        mine = obj if rank == root else f"ignored {rank}"
        assert broadcast_object(mine, root) == obj
        assert broadcast_object(mine, group_src=root) == obj
        mine = [obj] * rank  # another length on every rank
        assert all_gather_object(mine) == [[obj] * r for r in range(size)]
    assert broadcast_object(src=0) is None
    tensors = all_gather_object({"t": torch.arange(3) + rank})
    assert [t["t"].tolist() for t in tensors] == [
        [r, r + 1, r + 2] for r in range(size)
    ]
    twins = [None] * size
    dist.all_gather_object(twins, {"rank": rank})
    assert twins == all_gather_object({"rank": rank})
    with debug_checks():
        assert broadcast_object(rank, size - 1) == size - 1
        assert all_gather_object("x" * rank) == ["x" * r for r in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies(*SYMBOLS)
def test_any_object_arrives(world, size):
    world(size).run(transport)


def in_a_group() -> None:
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank not in (1, 3):
        return
    assert broadcast_object(rank, src=3, group=group) == 3
    assert broadcast_object(rank, group_src=0, group=group) == 1
    assert all_gather_object(rank, group) == [1, 3]
    if rank == 3:
        send_object("hello", 1, group)
    else:
        assert recv_object(3, group) == "hello"
    with pytest.raises(ValueError, match=r"src=0 is not in the group \[1, 3\]"):
        broadcast_object(rank, src=0, group=group)
    with pytest.raises(ValueError, match=r"dst=2 is not in the group \[1, 3\]"):
        send_object(rank, 2, group)
    with pytest.raises(ValueError, match="src=None, group_src=None"):
        recv_object(group=group)


@pytest.mark.verifies(*SYMBOLS)
def test_objects_inside_a_group(world):
    world(4).run(in_a_group)
