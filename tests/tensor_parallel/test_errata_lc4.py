"""What the original notes on tensor parallelism say, run, and what is right beside it.

Each test is the proof of one entry of the errata page; more proofs of that page are in
test_linear.py, test_blocks.py and tests/snippets/test_wrong_lc4.py.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.tensor_parallel import calls, counted
from tests.tensor_parallel.calls import BATCH, HIDDEN, SEQUENCE
from tests.tensor_parallel.dense import close, random_of
from xtrain.comm.autograd import all_gather_split
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.plan import Link
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from xtrain.tensor_parallel.attention import key_replicas, replica_ranks
from xtrain.tensor_parallel.functions import column_linear
from xtrain_docs.lectures.lc4.when_it_pays import layer_times

COLUMN = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
ROW = "xtrain.tensor_parallel.linear:RowParallelLinear"
ATTENTION = "xtrain.tensor_parallel.attention:ParallelAttention"
REPLICAS = (
    "xtrain.tensor_parallel.attention:key_replicas",
    "xtrain.tensor_parallel.attention:replica_ranks",
)
MODEL = "xtrain.model.decoder:XtrainModel"

X = BATCH * SEQUENCE * HIDDEN
"""Elements of a tensor that is as wide as the model, on all ranks together."""


@pytest.fixture(autouse=True)
def on_cpu(xtrain_worlds):
    """Skip elsewhere: calls are counted as gloo's ledger names them."""
    if xtrain_worlds.device != "cpu":
        pytest.skip("call logs are of CPUs")


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


# ------------------------------------------- E56, E57: what column and row layers call

CALLS = {
    "column": ([], [["all-reduce", X]]),
    "column, gathered": ([["all-gather", 2 * X]], [["all-reduce", X]]),
    "row": ([["all-reduce", X]], []),
    "row, splitting": ([["all-reduce", X]], [["all-gather", 2 * X]]),
    "column, sequence": (
        [["all-gather", X]],
        [["all-gather", X], ["reduce-scatter", X]],
    ),
    "row, sequence": ([["reduce-scatter", X]], [["all-gather", X]]),
}


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_columns_and_rows_call_exactly_this_in_each_mode(world, size):
    """The column layer's output and the row layer's input have twice as many."""
    for name, (forward, backward) in CALLS.items():
        for bias in (False, True):
            sums = [["all-reduce", HIDDEN]] if bias and name == "row, sequence" else []
            for found in world(size).run(calls.calls_of_layer, name, bias):
                assert found["forward"] == forward, name
                assert found["backward"] == sums + backward, name


# ------------------------------------------- E58: a number of sums that grows with L


def numbers_of_sums() -> dict[tuple[int, bool], tuple[int, ...]]:
    """All-reduces of [b, s, h] in forward and in backward, by layers and recompute."""
    found = {}
    for layers in (1, 3):
        for recompute in (False, True):
            step = counted.traffic_of_model(layers, False, recompute, "torch")
            found[layers, recompute] = tuple(
                sum(call == ["all-reduce", X] for call in part)
                for part in step["calls"]
            )
    return found


@pytest.mark.verifies(MODEL)
def test_a_model_of_l_layers_sums_4_l_times_and_6_l_if_it_recomputes(world):
    """And once more in each direction, for the embedding and for the head."""
    for found in world(2).run(numbers_of_sums):
        assert found == {
            (layers, recompute): (2 * layers + 1, (4 if recompute else 2) * layers + 1)
            for layers in (1, 3)
            for recompute in (False, True)
        }


# ---------------------------------- E59: an all-gather after each layer, or one sum


@pytest.mark.verifies(COLUMN, ROW, "xtrain.tensor_parallel.mlp:AllGatherMLP")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathering_after_each_layer_sends_five_h_and_a_sum_two_h(world, size):
    unit = X * 4 * (size - 1) // size
    gathers, sums = (
        world(size).run(counted.bytes_of_mlp, name) for name in counted.MLPS
    )
    for (forward, backward, y), (least, least_back, same) in zip(
        gathers, sums, strict=True
    ):
        assert (forward, backward) == (5 * unit, 10 * unit)
        assert (least, least_back) == (2 * unit, 2 * unit)
        assert y == pytest.approx(same, abs=1e-5)


# ------------------------------------------------ E60: what every rank has whole


def elements_here() -> tuple[int, int, dict[str, int]]:
    """This rank's parameters, all of one process, and what is whole on every rank."""
    config = XtrainConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = XtrainModel(config, mesh_of_all())
    whole = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if model.placement(name).count == 1
    }
    here = sum(parameter.numel() for parameter in model.parameters())
    return here, config.parameters, whole


def biases_here() -> list[list[int]]:
    layers = ColumnParallelLinear(4, 8), RowParallelLinear(4, 8)
    return [list(layer.bias.shape) for layer in layers]


@pytest.mark.verifies(MODEL)
def test_a_rank_has_more_than_its_share_by_norms_biases_and_shared_heads(world):
    for here, all_of_them, whole in world(2).run(elements_here):
        assert here > all_of_them / 2
        assert all("norm" in name for name in whole)
        assert len(whole) == 5
        assert here == (all_of_them + sum(whole.values())) / 2
    for here, all_of_them, whole in world(4).run(elements_here):
        keys = 2 * 2 * (2 * 2 * 8)  # k and v of two layers: two heads of size two
        norms = sum(whole.values())
        assert 4 * here == all_of_them + 3 * norms + keys  # each key head twice
    assert world(2).run(biases_here) == [[[4], [8]]] * 2


# -------------------------------------- E61: torch's collectives inside a forward


def gradient_through_torchs_collectives() -> dict[str, object]:
    """Of a weight before an all-gather, and before an all-reduce in place."""
    weight = torch.ones(2, 2, requires_grad=True)
    y = torch.ones(1, 2) @ weight
    pieces = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, y)
    found: dict[str, object] = {"plain": torch.cat(pieces, -1).requires_grad}
    all_gather_split(y, -1).sum().backward()
    found["ours"] = weight.grad.tolist()

    weight.grad = None
    y = (torch.ones(1, 2) @ weight).exp()
    dist.all_reduce(y)  # writes into what exp keeps for its backward
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y.sum().backward()
    found["in place"] = (weight.grad / torch.tensor(2.0).exp()).mean().item()
    found["warned"] = any("autograd kernel was not registered" in str(w) for w in said)
    return found


@pytest.mark.verifies("xtrain.comm.autograd:all_gather_split")
def test_torchs_all_gather_cuts_the_gradient_and_its_all_reduce_falsifies_it(world):
    for found in world(2).run(gradient_through_torchs_collectives):
        assert found["plain"] is False
        assert found["ours"] == [[1.0, 1.0]] * 2
        assert found["in place"] == pytest.approx(2.0)  # twice the right gradient
        if world(2).backend in ("gloo", "nccl"):  # whose calls are torch's operators
            assert found["warned"]


# --------------------------------------------- E62: which layer of attention sums


@pytest.mark.verifies(ATTENTION)
@pytest.mark.parametrize("size", [2, 3])
def test_the_only_sum_of_attention_is_that_of_its_output_projection(world, size):
    for found in world(size).run(counted.calls_around_attention):
        assert found["forward"] == [["all-reduce", X]]
        assert found["before and after the heads"] == [0, 0]
        assert found["before o_proj"] == 0
        assert found["heads here"] == 12 // size
        assert found["backward"] == [["all-reduce", X]]  # dX of the column layers


# --------------------------------------------------- E63: inside a node, or across


def sums_over_matrices(ranks: int, link: str, tokens: int = 4096) -> float:
    """Seconds of a layer's four all-reduces over those of its matrices."""
    work, sums = layer_times("llama-3-70b", tokens, ranks, link)
    return sums / work


def test_across_nodes_the_sums_take_longer_than_the_matrices():
    assert sums_over_matrices(8, "nvlink4") < 0.5
    assert sums_over_matrices(8, "infiniband-ndr") > 1
    assert sums_over_matrices(16, "infiniband-ndr") > 3
    assert Link.preset("nvlink4").duplex == 900e9  # the notes' number: both directions
    assert Link.preset("nvlink4").bandwidth == 450e9


# ------------------------------------------------- E64: what sequence slices save


@pytest.mark.verifies("xtrain.tensor_parallel.norm:ParallelRMSNorm")
def test_slices_of_the_sequence_divide_all_that_is_kept_but_the_rotary_table(world):
    table = 2 * SEQUENCE * 1 * 4  # cosine and sine of one pair
    whole = world(1).run(counted.bytes_saved, False)[0]
    for size in (2, 4):
        for found in world(size).run(counted.bytes_saved, True):
            assert (found["layer"] - table) * size == whole["layer"] - table
            assert found["norm"] * size == whole["norm"]
        for found in world(size).run(counted.bytes_saved, False):
            assert found["norm"] == whole["norm"]
            assert found["layer"] > 1.2 * whole["layer"] / size


@pytest.mark.verifies(MODEL)
def test_forward_sends_the_same_and_backward_gathers_each_input_once_more(world):
    size, layers = 2, 2
    sent = {
        split: world(size).run(counted.traffic_of_model, layers, split, False, "ring")[
            0
        ]["sent"]
        for split in (False, True)
    }
    assert sent[True][0] == sent[False][0]
    again = (2 * layers + 1) * X * 4 * (size - 1) // size  # the head's input, too
    assert sent[True][1] == sent[False][1] + again


# ------------------------------------------------ E66: fewer key heads than ranks


def heads_and_company(key_heads: int) -> tuple[int, list[int]]:
    size = dist.get_world_size()
    return key_replicas(key_heads, size), replica_ranks(key_heads)


def parts_of_a_shared_key() -> None:
    """Each rank's part of the gradient is another one; their sum is the true one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, key, used = random_of(0, 3, 4), random_of(1, 2, 4), random_of(2, size, 3, 2)
    key.requires_grad_()
    (own,) = column_linear(x, [key])
    (own * used[rank]).sum().backward()
    close(key.grad, used[rank].t() @ x)
    total = key.grad.clone()
    dist.all_reduce(total)
    close(total, used.sum(0).t() @ x)
    assert not torch.allclose(key.grad, total, rtol=0.1)


@pytest.mark.verifies(ATTENTION, *REPLICAS)
def test_a_key_head_is_held_by_as_many_ranks_as_there_are_for_it(world):
    pairs = world(4).run(heads_and_company, 2)
    assert pairs == [(2, [0, 1]), (2, [0, 1]), (2, [2, 3]), (2, [2, 3])]
    assert world(4).run(heads_and_company, 1) == [(4, [0, 1, 2, 3])] * 4
    assert world(4).run(heads_and_company, 8) == [(1, [rank]) for rank in range(4)]
    world(2).run(parts_of_a_shared_key)
