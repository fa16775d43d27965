"""Embeddings cut by vocabulary and by hidden size, against `nn.Embedding`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices import on_cpu
from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    mine,
    on_group,
    random_of,
)
from xtrain.tensor_parallel import HiddenParallelEmbedding, VocabParallelEmbedding

VOCAB = "xtrain.tensor_parallel.embedding:VocabParallelEmbedding"
HIDDEN = "xtrain.tensor_parallel.embedding:HiddenParallelEmbedding"


def ids_at_every_boundary(vocabulary: int, size: int) -> torch.Tensor:
    """The first and the last id of every rank's rows, some of them twice, [2, 3 N]."""
    part = vocabulary // size
    edges = [i for r in range(size) for i in (r * part, (r + 1) * part - 1)]
    row = (edges * 3)[: 3 * size]
    return torch.tensor([row, row[::-1]])


def against_dense(group) -> None:
    size = dist.get_world_size(group)
    dense = fill(nn.Embedding(5 * size, 3 * size))
    ids = ids_at_every_boundary(5 * size, size)
    y, grad = dense(ids), random_of(9, *ids.shape, 3 * size)
    dense.zero_grad()
    y.backward(grad)
    layer = VocabParallelEmbedding.from_full(dense, group)
    out = layer(ids)
    assert torch.equal(out, y)  # one owner and zeros: no rounding
    out.backward(grad)
    close(layer.weight.grad, mine(dense.weight.grad, 0, group), "rows")

    layer = VocabParallelEmbedding.from_full(dense, group, sequence_parallel=True)
    out = layer(ids)
    assert torch.equal(out, mine(y, 1, group))
    out.backward(mine(grad, 1, group))
    close(layer.weight.grad, mine(dense.weight.grad, 0, group), "rows of sequence")

    layer = HiddenParallelEmbedding.from_full(dense, group)
    out = layer(ids)
    assert torch.equal(out, y)
    out.backward(grad)
    close(layer.weight.grad, mine(dense.weight.grad, 1, group), "columns")
    alone = HiddenParallelEmbedding.from_full(dense, group, gather_output=False)
    assert torch.equal(alone(ids), mine(y, -1, group))


@pytest.mark.verifies(VOCAB, HIDDEN)
@ON_GROUPS
def test_outputs_and_gradients_are_those_of_the_whole_table(world, size, members):
    world(size).run(on_group, members, against_dense)


def new_ones_are_cut() -> None:
    for kind, dim in ((VocabParallelEmbedding, 0), (HiddenParallelEmbedding, 1)):
        torch.manual_seed(3)
        whole = nn.Embedding(8, 4)
        torch.manual_seed(3)
        layer = kind(8, 4)
        assert torch.equal(layer.weight, mine(whole.weight, dim))


@pytest.mark.verifies(VOCAB, HIDDEN)
def test_a_new_embedding_is_cut_from_the_one_that_torch_would_draw(world):
    world(2).run(new_ones_are_cut)


def refusals() -> None:
    for layer in (VocabParallelEmbedding(6, 4), HiddenParallelEmbedding(6, 4)):
        if on_cpu():
            with pytest.raises(ValueError, match=r"\[6, -1\] are outside the vocab"):
                layer(torch.tensor([[0, 6, -1]]))
        with pytest.raises(ValueError, match="not int64 or int32"):
            layer(torch.ones(2))
        with pytest.raises(ValueError, match="ids are NoneType, not int64"):
            layer(None)
    with pytest.raises(ValueError, match="num_embeddings: 7 is not divisible by"):
        VocabParallelEmbedding(7, 4)
    with pytest.raises(ValueError, match="embedding_dim: 5 is not divisible by"):
        HiddenParallelEmbedding(6, 5)


@pytest.mark.verifies(VOCAB, HIDDEN, "xtrain.tensor_parallel.shards:check_ids")
def test_ids_and_sizes_that_do_not_fit_are_refused_on_all_ranks(world):
    world(2).run(refusals)
