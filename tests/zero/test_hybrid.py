"""Hybrid sharding: equal to one process, whatever part of the ranks is one copy."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    batch_of,
    flat_groups,
    largest_difference,
    loss_of,
    make_model,
    pieces_of,
    reference,
    storages,
)
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import collectives_named
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.plan import Layout, state_memory, traffic_per_step
from xtrain.testing import World, expect_error
from xtrain.zero import AdamW, FullyShardedDataParallel
from xtrain.zero.hybrid import hybrid_groups

REPLICAS = "xtrain.zero.hybrid:Replicas"
GRID = "xtrain.zero.hybrid:grid_of"
GROUPS = "xtrain.zero.hybrid:hybrid_groups"
CHECKS = "xtrain.zero.hybrid_checks:check_grid"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
GRIDS = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "3x1": (3, 1), "2x2": (2, 2),
         "1x4": (1, 4), "4x1": (4, 1), "3x2": (3, 2), "2x3": (2, 3)}  # fmt: skip
STEPS = 4


def wrap(inner, seed, frozen=False, dtype=torch.float64, choice=None, **options):
    """A copy on every `inner` ranks. Only rank 0 has the weights of the reference."""
    bare = make_model(seed, frozen, dtype)
    shards, replicas = hybrid_groups(inner)
    return FullyShardedDataParallel(
        bare,
        shards,
        replicate_group=replicas,
        collectives=choice and collectives_named(choice),
        **options,
    )


def same_on_copies(model) -> None:
    """Every replica of a shard, and of a buffer, has the same bits."""
    held = [g.shard for g in flat_groups(model)] + list(model.buffers())
    for tensor in held:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, tensor.detach().cpu())
        inner = flat_groups(model)[0].size
        for rank, other in enumerate(everywhere):
            if rank % inner == dist.get_rank() % inner:
                assert torch.equal(other, tensor.detach().cpu()), rank


def train(inner, reduction, micro_batches, frozen, choice, reshard, blocks, max_norm):
    rank = dist.get_rank()
    model = wrap(
        inner,
        100 + rank if rank else 0,
        frozen,
        choice=choice,
        reshard_after_forward=reshard,
        blocks=blocks,
        gradient_reduction=reduction,
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.02, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        quiet = step % 2 and micro_batches > 1
        for micro in range(micro_batches):
            if quiet and micro < micro_batches - 1:
                with model.no_sync():
                    loss_of(model, batch_of(step, micro, rank)).backward()
            else:
                loss_of(model, batch_of(step, micro, rank)).backward()
        if step == 3:  # a forward whose backward never comes
            loss_of(model, batch_of(step, 0, rank))
        if max_norm:
            norms.append(model.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    same_on_copies(model)
    return model.full_state_dict(), norms


CASES = [
    ("average", 1, False, None, True, None, None),
    ("average", 2, True, "torch", False, None, 3.0),
    ("sum", 2, False, "ring", True, ["layers.0", "layers.2", "norm"], 3.0),
    ("sum", 1, True, "direct", True, None, None),
]


@pytest.mark.verifies(REPLICAS, GRID, GROUPS, FSDP)
@pytest.mark.parametrize("grid", GRIDS)
def test_steps_equal_one_process(world, grid):
    """Ranks begin with other weights and buffers, and have batches of other sizes."""
    inner, outer = GRIDS[grid]
    size = inner * outer
    for case in CASES if grid in ("2x1", "2x2") else CASES[1:3]:
        reduction, micro_batches, frozen, *_, max_norm = case
        expected = reference(
            size, STEPS, micro_batches, reduction == "average", frozen, max_norm
        )
        results = world(size).run(train, inner, *case)
        for found, norms in results:
            assert largest_difference(found, expected) < 1e-12, case
            assert norms == results[0][1], "norms have the same bits on each rank"


@pytest.mark.verifies(REPLICAS, GRID, GROUPS, FSDP)
@pytest.mark.parametrize("inner", [2, 4])
def test_eight_virtual_ranks_equal_one_process(inner):
    case = CASES[1]
    expected = reference(8, STEPS, 2, True, True, 3.0)
    for found, _ in World(8, "xtrain-virtual").run(train, inner, *case):
        assert largest_difference(found, expected) < 1e-12


def gradients_of_all():
    """Every gradient against that of the bare model on all batches, and its norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(0)
    for other in range(size):
        (loss_of(bare, batch_of(0, 0, other)) / size).backward()
    norm = nn.utils.clip_grad_norm_(bare.parameters(), 1e9)
    wholes = dict(bare.named_parameters())
    for inner in (n for n in range(1, size + 1) if size % n == 0):
        model = wrap(inner, rank)
        loss_of(model, batch_of(0, 0, rank)).backward()
        for name, piece, bounds in pieces_of(model):
            whole = wholes[name].grad.flatten()[bounds]
            close(piece.grad, whole, name)
        close(model.clip_grad_norm_(1e9), norm.double(), "norm")


def close(found, expected, what):
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-13, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.verifies(REPLICAS, FSDP, "xtrain.zero.flat_param_group:FlatParamGroup")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_gradient_is_that_of_one_process_and_counts_once(world, size):
    world(size).run(gradients_of_all)


def no_sync_then_reduce(inner):
    """Gradients of two micro-batches: nothing sent inside, then one sum of both."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(0)
    for other in range(size):
        for micro in range(2):
            loss_of(bare, batch_of(0, micro, other)).backward()
    wholes = dict(bare.named_parameters())
    model = wrap(inner, rank, gradient_reduction="sum", choice="ring")
    with model.no_sync(), CommLedger() as ledger:
        for micro in range(2):
            loss_of(model, batch_of(0, micro, rank)).backward()
    mine = dist.get_process_group_ranks(flat_groups(model)[0].group)
    peers = {event.peer for event in ledger.events}
    assert peers <= set(mine), "gathers alone, inside a copy"
    assert all(p.grad is None for p in model.parameters())
    model.reduce_gradients()
    for name, piece, bounds in pieces_of(model):
        close(piece.grad, wholes[name].grad.flatten()[bounds], name)
    model.reduce_gradients()  # there is nothing left
    for name, piece, bounds in pieces_of(model):
        close(piece.grad, wholes[name].grad.flatten()[bounds], name)


@pytest.mark.verifies(FSDP, REPLICAS)
def test_no_sync_sends_no_gradients_and_reduce_gradients_does(world):
    world(4).run(no_sync_then_reduce, 2)
    world(2).run(no_sync_then_reduce, 1)


class Ends(nn.Module):
    """Two layers of which a call may leave out the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x, both=True):
        x = torch.tanh(self.layers[0](x))
        return self.layers[1](x) if both else x


def copies_summed_later(how):
    """Three micro-batches, one sum over copies; a layer takes part in the first one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    bare = Ends().double()
    torch.manual_seed(rank)
    inner, outer = hybrid_groups(2)
    model = FullyShardedDataParallel(
        Ends().double(),
        inner,
        replicate_group=outer,
        collectives=collectives_named("ring"),
    )
    batches = [
        [
            torch.full((2, 3), 0.1 * (other + micro), dtype=torch.float64)
            for micro in range(3)
        ]
        for other in range(size)
    ]
    for batch in batches:
        for micro, x in enumerate(batch):
            (bare(x, micro == 0).square().sum() / size).backward()
    far = dist.get_process_group_ranks(outer)[1 - outer.rank()]
    with CommLedger() as ledger, model.no_all_reduce():
        for micro in range(2 + (how == "by a call inside")):
            model(batches[rank][micro], micro == 0).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert far not in {event.peer for event in ledger.events}
        if how == "by a call inside":
            model.reduce_gradients()
    if how == "by a backward":
        model(batches[rank][2], False).square().sum().backward()
    if how == "by a call":
        with model.no_sync():
            model(batches[rank][2], False).square().sum().backward()
        model.reduce_gradients()
    wholes = dict(bare.named_parameters())
    for name, piece, bounds in pieces_of(model):
        close(piece.grad, wholes[name].grad.flatten()[bounds], name)
    with model.no_all_reduce():
        model(batches[rank][0]).sum().backward()
    model.zero_grad()
    model.reduce_gradients()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.verifies(FSDP, REPLICAS, "xtrain.zero.flat_param_group:FlatParamGroup")
@pytest.mark.parametrize("how", ["by a backward", "by a call", "by a call inside"])
def test_copies_are_summed_once_for_all_micro_batches(world, how):
    world(4).run(copies_summed_later, how)


def without_copies():
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    with model.no_all_reduce():
        model(torch.ones(1, 2)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.verifies(FSDP)
def test_without_copies_there_is_no_sum_to_leave_out(world):
    assert world(2).run(without_copies) == [True, True]


# ------------------------------------------------------------- what is sent and held


def traffic(inner, dtype, reshard, micro_batches):
    """Bytes sent inside a copy and to other copies, and the sizes of the units."""
    rank = dist.get_rank()
    model = wrap(
        inner,
        rank,
        dtype=torch.float32,
        choice="ring",
        compute_dtype=dtype,
        reshard_after_forward=reshard,
    )
    near = set(dist.get_process_group_ranks(flat_groups(model)[0].group))
    with CommLedger() as ledger:
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_all_reduce():
                loss_of(model, batch_of(0, micro, rank)).backward()
    sent = {True: 0, False: 0}
    for event in ledger.events:
        if event.kind == "send":
            sent[event.peer in near] += event.nbytes
    padded = [sum(s.layout.padded_numel for s in u.flat_groups) for u in model.units]
    return sent[True], sent[False], padded[0], sum(padded[1:])


@pytest.mark.verifies(REPLICAS, FSDP)
@pytest.mark.parametrize("grid", ["1x2", "2x1", "2x2", "1x4", "4x1"])
def test_bytes_of_each_group_equal_the_formula(world, grid):
    """3(n-1)/n P inside for each micro-batch, 2(m-1)/m P/n outside for all of them.

    The root's weights are gathered once.
    """
    inner, outer = GRIDS[grid]
    for dtype, reshard, micro_batches in (
        (None, True, 1),
        (torch.bfloat16, True, 1),
        (None, False, 3),
    ):
        width, passes = (4 if dtype is None else 2), (3 if reshard else 2)
        arguments = inner, dtype, reshard, micro_batches
        results = world(inner * outer).run(traffic, *arguments)
        across = 0
        for near, far, root, blocks in results:
            elements = micro_batches * (2 * root + passes * blocks)
            assert near * inner == (inner - 1) * width * elements
            across += far
        # a ring of shards that m does not divide sends uneven chunks: 2(m-1) shards
        # of all m ranks together
        _, _, root, blocks = results[0]
        assert across == 2 * (outer - 1) * width * (root + blocks)


PLANNED = XtrainConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)  # no padding on up to 4 ranks


def sent_of_a_decoder(inner, micro_batches):
    """All bytes that this rank sends in and out of a copy; each part is a unit."""
    shards, replicas = hybrid_groups(inner)
    model = FullyShardedDataParallel(
        XtrainModel(PLANNED),
        shards,
        replicate_group=replicas,
        blocks=[DecoderLayer, "embed_tokens", "norm", "lm_head"],
        collectives=collectives_named("ring"),
    )
    tokens = torch.zeros(1, 4, dtype=torch.long)
    near = set(dist.get_process_group_ranks(shards))
    with CommLedger() as ledger:
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_all_reduce():
                model(tokens).sum().backward()
    sends = [event for event in ledger.events if event.kind == "send"]
    inside = sum(event.nbytes for event in sends if event.peer in near)
    return inside, sum(event.nbytes for event in sends) - inside


@pytest.mark.verifies(FSDP, "xtrain.plan.step_traffic:traffic_per_step")
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_bytes_of_a_decoder_are_those_that_the_plan_counts(world, inner):
    for micro_batches in (1, 2):
        layout = Layout(
            data=4, zero=3, replicate=4 // inner, micro_batches=micro_batches
        )
        transfers = traffic_per_step(PLANNED, layout, 4, dtypes="fp32")
        inside, outside = (
            sum(t.sent for t in transfers if (t.algorithm == "ring_all_reduce") is far)
            for far in (False, True)
        )
        for found in world(4).run(sent_of_a_decoder, inner, micro_batches):
            assert found == (inside, outside), micro_batches


def held(inner):
    rank = dist.get_rank()
    model = wrap(inner, rank, dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=0.01)
    loss_of(model, batch_of(0, 0, rank)).backward()
    gradients = storages([p.grad for p in model.parameters()])
    optimizer.step()
    assert storages(s.full for s in flat_groups(model)) == 0
    return (
        storages(model.parameters()),
        gradients,
        [s.layout.numel for s in flat_groups(model)],
    )


@pytest.mark.verifies(FSDP, REPLICAS)
def test_bytes_held_are_those_of_one_copy_over_the_inner_ranks(world):
    for inner in (1, 2, 4):
        for weights, gradients, groups in world(4).run(held, inner):
            expected = [state_memory(n, inner, 3, "fp32") for n in groups]
            assert weights == sum(memory.weights for memory in expected)
            assert gradients == sum(memory.gradients for memory in expected)


def sums_under_way(layers):
    """How many sums over replicas are under way as each layer's backward ends."""
    blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
    inner, outer = hybrid_groups(1)
    model = nn.Sequential(*blocks)
    model = FullyShardedDataParallel(
        model, inner, blocks=[nn.Linear], replicate_group=outer
    )
    found, replicas = [], model._schedule.replicas
    for block in blocks:
        block.register_full_backward_hook(
            lambda *_: found.append(len(replicas._under_way))
        )
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return found, len(replicas._under_way)


@pytest.mark.verifies(REPLICAS)
def test_sums_over_copies_run_beside_the_rest_of_backward(world):
    """The layer before has its shard under way when the next one has computed."""
    for found, after in world(2).run(sums_under_way, 5):
        assert found == sorted(found) and found[-1] >= 3, found
        assert after == 0


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("this backward fails")


def train_after_a_failure():
    rank, size = dist.get_rank(), dist.get_world_size()
    bare, model = make_model(0), wrap(1, rank)
    layer = model.module.layers[0]
    hook = layer.register_forward_hook(lambda _, __, output: Breaks.apply(output))
    with pytest.raises(RuntimeError, match="this backward fails"):
        loss_of(model, batch_of(0, 0, rank)).backward()
    assert model._schedule.replicas._under_way, "some sums were issued before"
    hook.remove()
    model.zero_grad()
    for other in range(size):
        (loss_of(bare, batch_of(1, 0, other)) / size).backward()
    loss_of(model, batch_of(1, 0, rank)).backward()
    wholes = dict(bare.named_parameters())
    for name, piece, bounds in pieces_of(model):
        close(piece.grad, wholes[name].grad.flatten()[bounds], name)


@pytest.mark.verifies(REPLICAS)
def test_sums_of_a_backward_that_failed_are_forgotten(world):
    world(2).run(train_after_a_failure)


# ------------------------------------------------------------------------ precision


def in_low_precision(dtype, compute_dtype, fp32_gradients):
    """Gradients of 2 x 2 and of 4 ranks without copies."""
    rank, found = dist.get_rank(), []
    for inner in (4, 2):
        model = wrap(
            inner,
            0,
            dtype=dtype,
            compute_dtype=compute_dtype,
            fp32_gradients=fp32_gradients,
        )
        for micro in range(2):
            loss_of(model, batch_of(0, micro, rank)).backward()
        kinds = {g.reduce_dtype for g in flat_groups(model)}
        for p in model.parameters():
            p.data = p.grad  # so that they are gathered
        for group in flat_groups(model):
            pieces = group.layout.pieces(group.shard, group.rank)
            for piece, p in zip(pieces, group.local_shards, strict=True):
                piece.copy_(p.data)
        found.append((model.full_state_dict(), kinds))
    return found


@pytest.mark.verifies(REPLICAS, "xtrain.zero.flat_param_group:FlatParamGroup")
@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "fp32_gradients", "sent"),
    [
        (torch.bfloat16, None, None, torch.float32),
        (torch.float32, torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.bfloat16, True, torch.float32),
    ],
)
def test_sixteen_bits_sum_in_fp32_where_they_do_without_copies(
    world, dtype, compute_dtype, fp32_gradients, sent
):
    """Both sums in the same dtype; in 16 bits up to the rounding of another order."""
    limit = 1e-6 if sent == torch.float32 and dtype == torch.float32 else 2e-2
    arguments = dtype, compute_dtype, fp32_gradients
    for (plain, kinds), (hybrid, others) in world(4).run(in_low_precision, *arguments):
        assert kinds == others == {sent}
        for name, right in plain.items():
            error = (hybrid[name].float() - right.float()).norm()
            assert error <= limit * right.float().norm(), name


def scaled_with_an_infinity(where):
    """GradScaler's verdict if one rank of one copy has an infinite loss."""
    rank = dist.get_rank()
    model = wrap(2, rank, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    factor = float("inf") if rank == where else 1.0
    scaler.scale(loss_of(model, batch_of(0, 0, rank)) * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    same = all(map(torch.equal, before, model.parameters()))
    return same, scaler.get_scale()


@pytest.mark.verifies(REPLICAS, "xtrain.zero.grad_scaler:ShardGradient")
def test_an_infinity_in_one_copy_makes_all_ranks_skip(world):
    assert world(4).run(scaled_with_an_infinity, 3) == [(True, 4.0)] * 4
    assert world(4).run(scaled_with_an_infinity, -1) == [(False, 8.0)] * 4


# ---------------------------------------------------------------------- checkpoints


def steps(model, optimizer, first, last):
    for step in range(first, last):
        loss_of(model, batch_of(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(inner, directory):
    model = wrap(inner, 0)
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    steps(model, optimizer, 0, 2)
    path = model.save_sharded(directory, 2, optimizer, {"inner": inner})
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def load(inner, directory, expected):
    """Into other weights; None: into FSDP without copies."""
    if inner is None:
        model = FullyShardedDataParallel(make_model(7))
    else:
        model = wrap(inner, 7)
    optimizer = AdamW(model.parameters(), lr=0.5)
    step, extra = model.load_sharded(directory, optimizer)
    assert step == 2
    steps(model, optimizer, 2, 4)
    assert largest_difference(model.full_state_dict(), expected) < 1e-12
    return extra


@pytest.mark.verifies(FSDP, "xtrain.zero.fsdp_checkpoint:save_units")
def test_a_checkpoint_loads_into_any_other_split(world, tmp_path):
    expected = reference(4, 4)
    sizes = {}
    for inner, others in ((2, (1, 4, None)), (4, (2,))):
        sizes[inner] = world(4).run(save, inner, str(tmp_path / f"{inner}"))[0]
        for other in others:
            extra = world(4).run(load, other, str(tmp_path / f"{inner}"), expected)
            assert extra == [{"inner": inner}] * 4
    assert sizes[2] < 1.3 * sizes[4], "copies are written once"


def full_states(inner):
    """Whole tensors out and in, of a model on the meta device, too."""
    bare, model = make_model(3), wrap(inner, 7)
    state = {name: t.detach() for name, t in bare.state_dict().items()}
    model.load_full_state_dict(state)
    assert largest_difference(model.full_state_dict(), state) == 0
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    shards, replicas = hybrid_groups(inner)
    model = FullyShardedDataParallel(empty, shards, replicate_group=replicas)
    state = {n: torch.ones(t.shape) for n, t in empty.state_dict().items()}
    whole = {n: torch.ones(shape) for n, shape in model.full_shapes().items()}
    assert state.keys() == whole.keys()
    model.load_full_state_dict(whole)
    assert largest_difference(model.full_state_dict(), whole) == 0


@pytest.mark.verifies(FSDP, "xtrain.zero.fsdp_checkpoint:load_full_state")
def test_whole_tensors_come_out_and_go_in(world):
    world(4).run(full_states, 2)


# --------------------------------------------------------------------------- groups


def made_groups(inner, members):
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    return [dist.get_process_group_ranks(g) for g in hybrid_groups(inner, group)]


@pytest.mark.verifies(GROUPS)
def test_neighbours_are_inner_groups(world):
    assert world(4).run(made_groups, 2, None) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    found = World(8, "xtrain-virtual").run(made_groups, 4, None)
    assert found[6] == [[4, 5, 6, 7], [2, 6]]
    found = world(4).run(made_groups, 1, [0, 2, 3])
    assert found == [[[0], [0, 2, 3]], None, [[2], [0, 2, 3]], [[3], [0, 2, 3]]]
    found = World(6, "xtrain-virtual").run(made_groups, 2, [1, 2, 4, 5])
    assert found[4] == [[4, 5], [1, 4]] and found[0] is None


def train_in_a_part():
    """Ranks 1 to 4 of 5 are 2 x 2; rank 0 does something else."""
    group, rank = dist.new_group([1, 2, 3, 4]), dist.get_rank()
    if rank == 0:
        return None
    inner, outer = hybrid_groups(2, group)
    model = FullyShardedDataParallel(make_model(rank - 1), inner, replicate_group=outer)
    assert dist.get_process_group_ranks(model.process_group) == [1, 2, 3, 4]
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(2):
        loss_of(model, batch_of(step, 0, rank - 1)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.verifies(GROUPS, GRID)
def test_a_part_of_the_ranks_trains_for_itself():
    expected = reference(4, 2, max_norm=1.0)
    _, *found = World(5, "xtrain-virtual").run(train_in_a_part)
    for state in found:
        assert largest_difference(state, expected) < 1e-12


def refused(case):
    rank = dist.get_rank()
    net = partial(nn.Linear, 2, 2)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3])]
    row, column = pairs[rank // 2], pairs[2 + rank % 2]
    odd = rank == 1
    if case == "no divisor":
        hybrid_groups(3)
    elif case == "another size on rank 1":
        hybrid_groups(4 if odd else 2)
    elif case == "no number":
        hybrid_groups(True if odd else 2)
    elif case == "not a grid":
        FullyShardedDataParallel(net(), row, replicate_group=row)
    elif case == "not in the outer group":
        other = pairs[2 + (rank + 1) % 2]
        FullyShardedDataParallel(net(), row, replicate_group=other)
    elif case == "another model in one copy":
        module = nn.Linear(2, 3) if rank == 3 else net()
        FullyShardedDataParallel(module, row, replicate_group=column)
    elif case == "another limit in one copy":
        model = FullyShardedDataParallel(net(), row, replicate_group=column)
        model(torch.ones(1, 2)).sum().backward()
        model.clip_grad_norm_(1.0 + (rank == 3))


REFUSED = {
    "no divisor": "inner_size=3 does not divide the 4 ranks of the group",
    "another size on rank 1": "inner_size is 2 and 4",
    "no number": "rank 1: inner_size=True is not a whole number",
    "not a grid": "are not the rows and columns of one grid",
    "not in the outer group": "is not a member of this group",
    "another model in one copy": r"ranks 0 and 3 have different parameters",
    "another limit in one copy": r"max_norm must be the same .*1.0, 1.0, 1.0, 2.0",
}


@pytest.mark.verifies(GROUPS, GRID, CHECKS)
@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_errors_on_every_rank(world, case):
    expect_error(world(4), refused, case, match=REFUSED[case])


def copies_on_rank_0_alone():
    inner, outer = hybrid_groups(2)
    chosen = outer if dist.get_rank() == 0 else None
    FullyShardedDataParallel(nn.Linear(2, 2), inner, replicate_group=chosen)


@pytest.mark.verifies(CHECKS)
def test_copies_on_some_ranks_alone_are_refused_on_all(world):
    match = "replicate_group is '?1 ranks'? and None"
    expect_error(world(2), copies_on_rank_0_alone, match=match)


# ---------------------------------------------------------------------------- torch


def beside_torch():
    """Weights after four steps: torch's `fully_shard` on a mesh of two dims, and ours.

    Its root unit and its layers are ours, so that both sum the same numbers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, found = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs = make_model(0)
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours = wrap(2, 0)
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
        for step in range(4):
            loss_of(model, batch_of(step, 0, rank)).backward()
            if step == 0:
                gradients = {n: p.grad for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        found.append((gradients, model))
    (mine, model), (whole, torchs) = found[1], found[0]
    for name, piece, bounds in pieces_of(model):
        right = whole[name].full_tensor().flatten()[bounds]
        close(mine[name], right, name)
        assert mine[name].numel() == piece.numel()
    full = model.full_state_dict()
    for name, parameter in torchs.named_parameters():
        close(full[name], parameter.full_tensor(), name)


@pytest.mark.verifies(FSDP, REPLICAS)
def test_gradients_and_weights_are_those_of_torchs_two_dimensional_mesh(
    world, xtrain_worlds
):
    if xtrain_worlds.device != "cpu":
        pytest.skip("torch's fully_shard is looked at on CPUs")
    world(4).run(beside_torch)
