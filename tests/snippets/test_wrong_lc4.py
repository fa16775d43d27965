"""The classic bugs of lc4: broken twins fail the checks that the right code passes."""

import math

import pytest
import torch
import torch.nn.functional as F
from snippets.wrong.lc4 import (
    bias_on_every_rank,
    contiguous_copy,
    counted_by_name,
    drawn_in_pieces,
    dx_counted_twice,
    dx_not_summed,
    fan_in_of_the_shard,
    float_is_an_alias,
    gathered_logits,
    in_place_sum,
    loss_of_own_columns,
    masks,
    norm_of_a_slice,
    norm_summed,
    owner_of_ids,
    plain_collective,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.snippets.gallery import all_fail, drawn, failures, ranks, told_apart
from xtrain.comm.autograd import (
    all_gather_split,
    identity_all_reduce,
    identity_sum,
)
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelRMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from xtrain.tensor_parallel.functions import column_linear

F_ = "xtrain.comm.autograd:_IdentityAllReduce"
SUM_ASYNC = "xtrain.comm.autograd:all_reduce_async"
GATHER = "xtrain.comm.autograd:_AllGatherSplit"
IDENTITY_SUM = "xtrain.comm.autograd:identity_sum"
COLUMN = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
COLUMN_FUNCTION = "xtrain.tensor_parallel.functions:_ColumnLinear"
ROW = "xtrain.tensor_parallel.linear:RowParallelLinear"
CUT = "xtrain.tensor_parallel.linear:ShardedLinear"
ATTENTION = "xtrain.tensor_parallel.attention:ParallelAttention"
NORM = "xtrain.tensor_parallel.norm:ParallelRMSNorm"
EMBEDDING = "xtrain.tensor_parallel.embedding:VocabParallelEmbedding"
LOSS = "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
LOSS_FUNCTION = "xtrain.tensor_parallel.cross_entropy:_CrossEntropy"
PLACEMENT = "xtrain.checkpoint.parameter_slice:Placement"


# ---------------------------------------------------------- the sums of the gradients


def gather_of_ours(y):
    return all_gather_split(y, -1)


def gradient_passes_the_gather(gather, trained) -> None:
    rank, size = ranks()
    weight, x = drawn(0, 2 * size, 3), drawn(1, 4, 3)
    whole = weight.clone().requires_grad_()
    (x @ whole.t()).square().sum().backward()
    shard = weight.chunk(size)[rank].clone().requires_grad_(trained)
    y = gather(x @ shard.t())
    torch.testing.assert_close(y.detach(), x @ weight.t())
    assert y.requires_grad == trained
    if trained:
        y.square().sum().backward()
        torch.testing.assert_close(shard.grad, whole.grad.chunk(size)[rank])


@pytest.mark.verifies(GATHER)
def test_a_plain_collective_cuts_the_gradient(worlds):
    wrong = plain_collective.gather
    check = gradient_passes_the_gather
    told_apart(worlds, check, gather_of_ours, wrong, True)
    worlds[2].run(check, wrong, False)  # what hides it


def column_of_ours(x, shard):
    return column_linear(x, [shard])[0]


def column_by_f(x, shard):
    return identity_all_reduce(x) @ shard.t()


def gradients_of_a_column_layer(function, needs_x) -> None:
    rank, size = ranks()
    weight, x, grad = drawn(0, 2 * size, 3), drawn(1, 4, 3), drawn(2, 4, 2 * size)
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    here = x.clone().requires_grad_(needs_x)
    function(here, shard).backward(grad.chunk(size, 1)[rank])
    torch.testing.assert_close(shard.grad, (grad.t() @ x).chunk(size)[rank])
    if needs_x:
        torch.testing.assert_close(here.grad, grad @ weight)


@pytest.mark.verifies(F_, COLUMN_FUNCTION)
def test_the_gradient_of_the_input_is_a_sum_over_ranks(worlds):
    wrong = dx_not_summed.column_linear
    for right in (column_of_ours, column_by_f):
        told_apart(worlds, gradients_of_a_column_layer, right, wrong, True)
    for size, needs_x in ((1, True), (2, False)):  # what hides it
        worlds[size].run(gradients_of_a_column_layer, wrong, needs_x)


def query_and_key_of_ours(x, query_shard, key_weight):
    """f on the key's weight, among those who hold it: dX is summed once."""
    _, size = ranks()
    key_weight = identity_sum(key_weight, range(size))
    return column_linear(x, [query_shard, key_weight])


def gradients_through_queries_and_a_shared_key(function, through) -> None:
    rank, size = ranks()
    x, queries, key = drawn(0, 3, 4), drawn(1, 2 * size, 4), drawn(2, 2, 4)
    used = drawn(3, 2, size, 3, 2)  # by each rank in its own way
    x, key = x.requires_grad_(), key.requires_grad_()
    all_queries = (x @ queries.t()).unflatten(-1, (size, 2)).transpose(0, 1)
    (used[0] * all_queries).sum().add((used[1] * (x @ key.t())).sum()).backward()
    right_dx, right_dk = x.grad, key.grad
    if through == "query":
        right_dx, right_dk = torch.cat(list(used[0]), 1) @ queries, None
    x.grad = key.grad = None
    query, own_key = function(x, queries.chunk(size)[rank], key)
    loss = (query * used[0, rank]).sum()
    if through == "both":
        loss = loss + (own_key * used[1, rank]).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, right_dx)
    if right_dk is not None:
        torch.testing.assert_close(key.grad, right_dk)


@pytest.mark.verifies(IDENTITY_SUM, COLUMN_FUNCTION)
def test_what_passes_a_shared_key_is_summed_once(worlds):
    check = gradients_through_queries_and_a_shared_key
    wrong = dx_counted_twice.query_and_key
    told_apart(worlds, check, query_and_key_of_ours, wrong, "both")
    worlds[2].run(check, wrong, "query")  # what hides it: the queries alone
    worlds[1].run(check, wrong, "both")


def f_of_ours(z):
    return identity_all_reduce(z)


def apply_in_place(z):
    return in_place_sum.CopyToRegion.apply(z)


def apply_to_a_copy(z):
    return contiguous_copy.CopyToRegion.apply(z)


def f_sums_and_leaves_the_rest(f, residual, transposed) -> None:
    rank, size = ranks()
    z = drawn(0, 2, 3).requires_grad_()
    y = f(z) + z if residual else f(z)
    y = y.t() if transposed else y
    used = drawn(1, size, *y.shape)  # by each rank in its own way
    grad = used[rank].clone()
    y.backward(grad)
    summed = used.sum(0) + (used[rank] if residual else 0)
    torch.testing.assert_close(z.grad, summed.t() if transposed else summed)
    if residual:
        assert torch.equal(grad, used[rank]), "the gradient that came in was written"


@pytest.mark.verifies(F_, SUM_ASYNC)
def test_a_sum_in_place_is_read_by_a_residual(worlds):
    check = f_sums_and_leaves_the_rest
    for size in (2, 3):
        for transposed in (False, True):
            worlds[size].run(check, f_of_ours, True, transposed)
        all_fail(worlds[size], check, apply_in_place, True, False)
    worlds[2].run(check, apply_in_place, False, False)  # what hides it
    worlds[1].run(check, apply_in_place, True, False)


@pytest.mark.verifies(F_)
def test_a_gradient_that_is_not_contiguous_is_summed_too(worlds):
    check = f_sums_and_leaves_the_rest
    told_apart(worlds, check, f_of_ours, apply_to_a_copy, False, True)
    worlds[2].run(check, apply_to_a_copy, True, False)  # what hides it
    worlds[1].run(check, apply_to_a_copy, False, True)


# ------------------------------------------------------- what several ranks hold alike


def norm_of_ours(x, weight, sequence_parallel):
    layer = ParallelRMSNorm(
        len(weight), sequence_parallel=sequence_parallel, dtype=weight.dtype
    )
    layer.weight = weight
    return layer(x)


def gradient_of_a_norm(norm, split) -> None:
    """Each rank has the whole sequence, or its slice: the gradient is the same."""
    rank, size = ranks()
    x, grad = drawn(0, 2, 2 * size, 5), drawn(1, 2, 2 * size, 5)
    whole = nn.Parameter(drawn(2, 5))
    F.rms_norm(x, (5,), whole).backward(grad)
    weight = nn.Parameter(drawn(2, 5))
    if split:
        x, grad = x.chunk(size, 1)[rank], grad.chunk(size, 1)[rank]
    norm(x, weight).backward(grad)
    torch.testing.assert_close(weight.grad, whole.grad)


def norm_of_a_whole(x, weight):
    return norm_of_ours(x, weight, False)


def norm_of_a_split_sequence(x, weight):
    return norm_of_ours(x, weight, True)


@pytest.mark.verifies(NORM)
def test_the_gradient_of_a_norm_is_summed_if_the_sequence_is_split_and_only_then(
    worlds,
):
    check = gradient_of_a_norm
    summed, of_a_slice = norm_summed.norm, norm_of_a_slice.norm
    told_apart(worlds, check, norm_of_a_whole, summed, False)
    told_apart(worlds, check, norm_of_a_split_sequence, of_a_slice, True)
    worlds[2].run(check, summed, True)  # each is the other's right form
    worlds[2].run(check, of_a_slice, False)


def row_of_ours(x, shard, bias):
    _, size = ranks()
    outputs, inputs = shard.shape
    layer = RowParallelLinear(inputs * size, outputs, dtype=shard.dtype)
    layer.weight.data, layer.bias.data = shard, bias
    return layer(x)


def bias_is_added_once(row_linear, scale) -> None:
    rank, size = ranks()
    x, weight, bias = drawn(0, 4, 2 * size), drawn(1, 3, 2 * size), drawn(2, 3) * scale
    y = row_linear(x.chunk(size, 1)[rank], weight.chunk(size, 1)[rank], bias)
    torch.testing.assert_close(y, F.linear(x, weight, bias))


@pytest.mark.verifies(ROW)
def test_a_bias_on_every_rank_is_added_as_often(worlds):
    wrong = bias_on_every_rank.row_linear
    told_apart(worlds, bias_is_added_once, row_of_ours, wrong, 1.0, sizes=(2, 4))
    worlds[4].run(bias_is_added_once, wrong, 0.0)  # what hides it
    worlds[1].run(bias_is_added_once, wrong, 1.0)


def masks_of(generators) -> tuple[list[float], list[float]]:
    """What this rank keeps of a replicated and of a split tensor."""
    replicated, split = generators(seed=7)
    ones = torch.ones(64)
    return tuple(masks.dropout(ones, g).tolist() for g in (replicated, split))


def masks_are_right(found) -> tuple[bool, bool]:
    whole, split = zip(*found, strict=True)
    different = {tuple(mask) for mask in split}
    return len({tuple(mask) for mask in whole}) == 1, len(different) == len(split)


def test_replicated_tensors_share_a_mask_and_slices_do_not(worlds):
    for size in (2, 3):
        right = worlds[size].run(masks_of, masks.two_states)
        assert masks_are_right(right) == (True, True)
        assert masks_are_right(worlds[size].run(masks_of, masks.alike)) == (True, False)
        by_rank = worlds[size].run(masks_of, masks.by_rank)
        assert masks_are_right(by_rank) == (False, True)


# ------------------------------------------------------------------- the vocabulary


def lookup_of_ours(ids, shard):
    _, size = ranks()
    rows, hidden = shard.shape
    layer = VocabParallelEmbedding(rows * size, hidden, dtype=shard.dtype)
    layer.weight.data = shard
    return layer(ids)


def every_id_is_looked_up(lookup, ids) -> None:
    rank, size = ranks()
    table = drawn(0, 3 * size, 2)
    shard = table.chunk(size)[rank].clone()
    assert torch.equal(lookup(ids, shard), table[ids])


@pytest.mark.verifies(EMBEDDING)
def test_ids_on_both_sides_of_every_boundary(worlds):
    check = every_id_is_looked_up
    for size in (2, 3):
        ids = torch.arange(3 * size).view(size, 3)
        worlds[size].run(check, lookup_of_ours, ids)
        for wrong in (owner_of_ids.without_mask, owner_of_ids.off_by_one):
            all_fail(worlds[size], check, wrong, ids)
    inside = torch.tensor([1, 2, 4, 5])  # what hides it: no first row of a rank
    worlds[2].run(check, owner_of_ids.off_by_one, inside)
    worlds[1].run(check, owner_of_ids.without_mask, torch.arange(3))


def loss_is_torchs(function, logits, labels) -> None:
    rank, size = ranks()
    loss = function(logits.chunk(size, -1)[rank], labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


@pytest.mark.verifies(LOSS)
def test_big_logits_and_labels_of_one_rank_show_a_local_loss(worlds):
    check, world = loss_is_torchs, worlds[2]
    logits, spread = drawn(0, 6, 8).float(), torch.tensor([0, 7, 3, 4, 2, 5])
    of_rank_0 = spread % 4
    big = logits * 60
    for x in (logits, big):
        for labels in (spread, of_rank_0):
            world.run(check, vocab_parallel_cross_entropy, x, labels)
    all_fail(world, check, loss_of_own_columns.without_max, big, spread)
    all_fail(world, check, loss_of_own_columns.own_max, logits, spread)
    found = failures(world, check, loss_of_own_columns.own_labels, logits, of_rank_0)
    assert found.keys() == {1}  # rank 0 has all labels, and is right
    all_fail(world, check, loss_of_own_columns.own_labels, logits, spread)
    # What hides them: small logits, equal largest ones.
    world.run(check, loss_of_own_columns.without_max, logits, spread)
    equal = torch.cat([logits[:, :4]] * 2, 1)
    world.run(check, loss_of_own_columns.own_max, equal, spread)


def by_the_log_of_the_ranks(function, excess) -> None:
    """How much more than torch's loss this is."""
    rank, size = ranks()
    logits, labels = drawn(0, 6, 4 * size), torch.arange(6) % (4 * size)
    loss = function(logits.chunk(size, -1)[rank], labels)
    right = F.cross_entropy(logits, labels)
    torch.testing.assert_close(loss - right, torch.tensor(excess).double())


@pytest.mark.verifies(LOSS)
def test_gathered_logits_are_too_many_by_the_log_of_the_ranks(worlds):
    check, wrong = by_the_log_of_the_ranks, gathered_logits.loss_of
    for size in (2, 3):
        worlds[size].run(check, vocab_parallel_cross_entropy, 0.0)
        all_fail(worlds[size], check, wrong, 0.0)
        worlds[size].run(check, wrong, math.log(size))
    worlds[1].run(check, wrong, 0.0)  # what hides it


def leaves_the_logits_alone(function, dtype) -> None:
    logits, labels = drawn(0, 4, 6).to(dtype), torch.tensor([0, 5, 2, 3])
    before = logits.clone()
    function(logits, labels)
    assert torch.equal(logits, before)


@pytest.mark.verifies(LOSS, LOSS_FUNCTION)
def test_fp32_logits_are_copied_before_they_are_written(worlds):
    check, wrong = leaves_the_logits_alone, float_is_an_alias.cross_entropy
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        worlds[1].run(check, vocab_parallel_cross_entropy, dtype)
    all_fail(worlds[1], check, wrong, torch.float32)
    worlds[1].run(check, wrong, torch.bfloat16)  # what hides it


# ----------------------------------------------------------------------- the weights


def slice_of_ours(rows, columns):
    return ColumnParallelLinear(columns, rows, bias=False).weight


def shards_are_slices_of_one_draw(row_slice) -> None:
    """Equal seeds give the weight of one process, of which no two rows are equal."""
    _, size = ranks()
    torch.manual_seed(0)
    one = nn.Linear(5, 4 * size, bias=False).weight
    torch.manual_seed(0)
    whole = drawn_in_pieces.gathered(row_slice(4 * size, 5))
    assert len(whole.unique(dim=0)) == 4 * size
    assert torch.equal(whole, one)


@pytest.mark.verifies(COLUMN, CUT)
def test_shards_that_each_rank_draws_alike_are_one_shard(worlds):
    check, wrong = shards_are_slices_of_one_draw, drawn_in_pieces.row_slice
    told_apart(worlds, check, slice_of_ours, wrong)
    worlds[1].run(check, wrong)  # what hides it


def test_layers_of_one_shape_do_not_begin_alike():
    """The same bug by stages of a pipeline: one seed for each, and equal layers."""
    model = XtrainModel(config_of(key_heads=2))
    first, second = (layer.mlp.up_proj.weight for layer in model.layers)
    assert not torch.equal(first, second)
    stages = []
    for _ in range(2):
        torch.manual_seed(0)
        stages.append(nn.Linear(4, 4).weight)
    assert torch.equal(*stages)


def columns_of_ours(out_features, in_features, rank, size):
    return RowParallelLinear(in_features, out_features).weight


def spread_is_that_of_one_process(column_slice) -> None:
    rank, size = ranks()
    torch.manual_seed(0)
    mine = column_slice(256, 256, rank, size).detach()
    assert mine.shape == (256, 256 // size)
    expected = torch.tensor(1 / math.sqrt(3 * 256))
    torch.testing.assert_close(mine.std(), expected, rtol=0.02, atol=0)


@pytest.mark.verifies(ROW, CUT)
def test_the_spread_goes_by_the_whole_layers_fan_in(worlds):
    wrong = fan_in_of_the_shard.column_slice
    check = spread_is_that_of_one_process
    told_apart(worlds, check, columns_of_ours, wrong, sizes=(2, 4))
    worlds[1].run(check, columns_of_ours)
    worlds[1].run(check, wrong)  # what hides it


def config_of(key_heads: int) -> XtrainConfig:
    return XtrainConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
    )


def count_by_placement(model):
    """Each parameter's shape as a whole, from the table that cuts it."""
    return sum(
        math.prod(model.placement(name).full_shape(parameter))
        for name, parameter in model.named_parameters()
    )


def counts_every_parameter_once(count, key_heads) -> None:
    _, size = ranks()
    config = config_of(key_heads)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    assert count(XtrainModel(config, mesh)) == config.parameters


@pytest.mark.verifies(PLACEMENT, "xtrain.model.parameters:placement_of")
def test_parameters_are_counted_from_the_table_and_not_by_their_names(worlds):
    check, wrong = counts_every_parameter_once, counted_by_name.count
    for key_heads in (1, 2):
        told_apart(worlds, check, count_by_placement, wrong, key_heads, sizes=(2,))
    worlds[1].run(check, wrong, 1)  # what hides it
