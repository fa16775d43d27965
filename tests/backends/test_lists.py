"""Lists of tensors on which the ranks disagree, from the second tensor on."""

import pytest
import torch
import torch.distributed as dist


def lists_differ(name: str) -> str:
    """On rank 0 the second and the third tensor have changed places."""
    rank = dist.get_rank()
    sizes = [2, 4, 3] if rank == 0 else [2, 3, 4]
    pieces, mine = [torch.ones(n) for n in sizes], torch.full((sizes[rank],), 5.0)
    pair = (mine, pieces) if name == "reduce_scatter" else (pieces, mine)
    with pytest.raises(RuntimeError, match="in different calls") as error:
        getattr(dist, name)(*pair)
    assert mine.tolist() == [5.0] * sizes[rank]
    assert all(bool((piece == 1).all()) for piece in pieces)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3
    return str(error.value)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_every_tensor_of_a_list_is_compared(ours, name):
    texts = ours(3).run(lists_differ, name)
    assert len(set(texts)) == 1
    assert all(f"rank {rank}: {name}(" in texts[0] for rank in range(3))
