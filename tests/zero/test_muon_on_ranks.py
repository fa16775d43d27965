"""Muon on ranks, under every wrapper: one process's steps, and the formula's bytes."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.model.mesh_training import batch
from tests.model.twins import config_of
from tests.training import my_group, pieces_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import DIRECT
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    Muon,
    ZeroOptimizer,
    clip_sharded_grad_norm_,
    hidden_matrices,
    matrix_layout,
)
from xtrain.zero.hybrid import hybrid_groups

MUON = "xtrain.zero.muon:Muon"
RANKS = "xtrain.zero.muon_ranks:DealtMatrices"
VERIFIED = MUON, RANKS, "xtrain.zero.muon_layout:matrix_layout"
SHARDED = *VERIFIED, "xtrain.zero.optimizer:ZeroOptimizer"
STAGES = {"stage 1": 1, "stage 2": 2}
"""Wrappers: Muon inside `ZeroOptimizer`, where "zero 1" is Muon alone."""
STEPS = 5
OPTIONS = {"lr": 0.02, "weight_decay": 0.2, "ns_dtype": torch.float64}
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"intermediate_size": 8}


def randn(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


# --- a decoder on a mesh --------------------------------------------------------------


class Run(NamedTuple):
    """A wrapper around a model on a mesh of these sizes."""

    wrapper: str
    data: int = 1
    tensor: int = 1
    expert: int = 0
    context: int = 1

    @property
    def size(self) -> int:
        return self.data * self.tensor * max(1, self.expert) * self.context


class Training:
    """A model in a layout, with Muon for its layers and AdamW for the rest."""

    def __init__(self, run: Run, changes: dict):
        axis = "expert_data" if run.expert else "data"
        sizes = {axis: run.data, "expert": run.expert, "context": run.context}
        sizes["tensor"] = run.tensor
        sizes = {name: n for name, n in sizes.items() if n > (name != axis)}
        self.mesh = init_mesh(tuple(sizes.values()), tuple(sizes))
        self.bare = XtrainModel(config_of(**changes), self.mesh, dtype=torch.float64)
        self.model, reduction = self.bare, None
        if run.wrapper == "ddp":
            self.model = DistributedDataParallel(self.bare)
        if run.wrapper == "fsdp":
            self.model = FullyShardedDataParallel(self.bare, blocks=[DecoderLayer])
        if run.wrapper == "zero 1":
            reduction = "sum"
        small = {"bucket_cap_mb": 2**-9}  # a few rounds, or buckets
        matrices, others = hidden_matrices(self.model)
        if stage := STAGES.get(run.wrapper):
            zero = partial(ZeroOptimizer, stage=stage, **small)
            layout = matrix_layout(self.bare)
            self.muon = zero(matrices, Muon, layout=layout, **OPTIONS)
            self.adamw = zero(others, AdamW, lr=0.03)
            return
        options = OPTIONS | small
        self.muon = Muon.of(self.model, gradient_reduction=reduction, **options)
        if run.wrapper == "zero 1":
            self.adamw = ZeroOptimizer(others, AdamW, lr=0.03)
        else:
            self.adamw = AdamW(others, lr=0.03)

    def train(self, first: int, last: int) -> None:
        here, size = self.bare.data.rank(), self.bare.data.size()
        for step in range(first, last):
            tokens, labels = (t.chunk(size)[here] for t in batch(step))
            self.model(tokens, labels).backward()
            self.bare.sync_gradients()
            for optimizer in (self.muon, self.adamw):
                optimizer.step()
                optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.model, FullyShardedDataParallel):
            full = self.model.full_state_dict()
            return {name: full[name] for name, _ in self.bare.named_parameters()}
        return {n: p.detach().clone() for n, p in self.bare.named_parameters()}

    def error(self, expected: dict[str, torch.Tensor]) -> float:
        return max(
            (weight - self.bare.placement(name).of(expected[name])).abs().max().item()
            for name, weight in self.weights().items()
        )

    def held(self) -> int:
        """Elements of momentum on this rank."""
        return momentum_of(self.muon)


def momentum_of(optimizer) -> int:
    """Elements of momentum on this rank, without the padding of ZeRO's last shard."""
    held = {p: s["momentum_buffer"].numel() for p, s in optimizer.state.items()}
    for bucket in getattr(optimizer, "buckets", ()):
        if size := held.get(bucket.master):
            rest = bucket.layout.numel - optimizer.rank * size
            held[bucket.master] = min(size, max(rest, 0))
    return sum(held.values())


def one_process(changes: dict, steps: int = STEPS):
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    matrices, others = hidden_matrices(model)
    optimizers = Muon(matrices, **OPTIONS), AdamW(others, lr=0.03)
    for step in range(steps):
        model.loss(*batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def errors(run, changes, expected):
    training = Training(run, changes)
    training.train(0, STEPS)
    weights = [w for _, w in sorted(training.weights().items())]
    sums = torch.stack([w.sum() for w in weights])
    return training.error(expected), sums, training.held()


def check_runs(world, runs, changes) -> None:
    """Equal to one process; each element of momentum on one rank.

    Where copies of ZeRO's shards are on expert or context ranks, some have it, too.
    """
    expected = one_process(changes)
    model = XtrainModel(config_of(**changes))
    elements = sum(p.numel() for p in hidden_matrices(model)[0])
    for run in runs:
        results = world(run.size).run(errors, run, changes, expected)
        assert max(error for error, _, _ in results) < 1e-9, run
        held, copies = sum(held for _, _, held in results), 1
        if run.wrapper in STAGES:
            copies = max(1, run.expert) * run.context
        assert elements <= held <= copies * elements, run


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "zero 1", *STAGES, "fsdp"])
def test_five_steps_over_data_equal_one_process(world, wrapper, size):
    """Sizes that the ranks do not divide: a width of 7, and 3 ranks."""
    check_runs(world, [Run(wrapper, size)], SMALL)


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)], ids=str)
def test_five_steps_of_a_cut_model_equal_one_process(world, mesh):
    """On 4 tensor ranks two hold each key head alike."""
    wrappers = ("plain", "ddp", "zero 1", *STAGES, "fsdp")
    if mesh[0] == 1:
        wrappers = ("plain", "fsdp")
    check_runs(world, [Run(wrapper, *mesh) for wrapper in wrappers], SMALL)


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2},
        {"data": 3},
        {"data": 1, "expert": 2},
        {"data": 1, "expert": 2, "tensor": 2},
        {"data": 2, "expert": 2},
    ],
    ids=str,
)
def test_five_steps_of_experts_equal_one_process(world, sizes):
    wrappers = ("plain", "zero 1", *STAGES, "fsdp")
    if sizes["data"] == 1:
        wrappers = ("plain",)
    check_runs(world, [Run(wrapper, **sizes) for wrapper in wrappers], EXPERTS)


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)], ids=str)
def test_five_steps_with_context_ranks_equal_one_process(world, sizes):
    data, context = sizes
    wrappers = ("plain", "zero 1", *STAGES, "fsdp")
    runs = [Run(w, data, context=context) for w in wrappers]
    check_runs(world, runs, SMALL)


# --- bit for bit torch's --------------------------------------------------------------


class Matrices(nn.Module):
    def __init__(self, *shapes: tuple[int, ...], dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList()
        for number, shape in enumerate(shapes):
            layer = nn.Module()
            layer.weight = nn.Parameter(randn(*shape, seed=number, dtype=dtype))
            self.layers.append(layer)


SHAPES = [(5, 12), (13, 4), (8, 8), (1, 7), (16, 24)]
BUCKETS = [183, 384]
"""Elements of the two in which `in_zero` has these, reduced and gathered in fp32."""


def in_zero(model, stage, reduction="average", ns_dtype=torch.bfloat16, **options):
    """Two buckets, in which the cuts fall into matrices."""
    made = partial(Muon, ns_dtype=ns_dtype, collectives=DIRECT)
    fixed = {"bucket_cap_mb": 2**-10, "collectives": DIRECT}
    fixed |= {"gradient_reduction": reduction, "layout": matrix_layout(model)}
    return ZeroOptimizer(model.parameters(), made, stage, **fixed, **options)


def with_torchs_steps(wrapper):
    """Given gradients, in place of a backward's; torch's bfloat16, in the messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, model = Matrices(*SHAPES), Matrices(*SHAPES)
    theirs = torch.optim.Muon(whole.parameters(), lr=0.02)
    if wrapper == "fsdp":
        model = FullyShardedDataParallel(model)
        ours = Muon.of(model, lr=0.02)
    elif wrapper == "zero 1":
        ours = Muon.of(model, lr=0.02, gradient_reduction="sum")
    else:
        ours = in_zero(model, 1, "sum", lr=0.02)
    names = dict(whole.named_parameters())
    for step in range(STEPS):
        for number, (name, parameter) in enumerate(names.items()):
            parameter.grad = randn(*parameter.shape, seed=7 * step + number).float()
            if wrapper != "fsdp":  # whole numbers: their sum is exact
                parameter.grad.mul_(8).round_()
                mine = model.get_parameter(name)
                mine.grad = torch.full_like(mine, float(rank))
                if rank == 0:
                    mine.grad += parameter.grad - size * (size - 1) / 2
        if wrapper == "fsdp":
            for name, piece, bounds in pieces_of(model):
                piece.grad = names[name].grad.flatten()[bounds]
        theirs.step()
        ours.step()
        ours.zero_grad()
    if wrapper == "fsdp":
        full = model.full_state_dict()
        return [torch.equal(full[name], p) for name, p in names.items()]
    return [torch.equal(model.get_parameter(n), p) for n, p in names.items()]


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("wrapper", ["zero 1", "stage 1", "fsdp"])
def test_five_steps_are_torchs_bit_for_bit(world, wrapper, size):
    for equal in world(size).run(with_torchs_steps, wrapper):
        assert all(equal), equal


# --- bytes ----------------------------------------------------------------------------


def traffic(wrapper, shapes, dtype):
    """What a rank sends and receives in a step, and elements of matrices: those it
    owns, those it holds, those that are both."""
    rank = dist.get_rank()
    model = Matrices(*shapes)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    if wrapper == "fsdp":
        model = FullyShardedDataParallel(model, blocks=[])
    if stage := STAGES.get(wrapper):
        optimizer = in_zero(model, stage, ns_dtype=dtype)
        muon = optimizer.optimizer
    else:
        reduction = "average" if wrapper == "zero 1" else None
        options = {"ns_dtype": dtype, "collectives": DIRECT}
        optimizer = muon = Muon.of(model, gradient_reduction=reduction, **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    with CommLedger() as ledger:
        if stage:
            sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
    owned = {s.name: s for s, owner in muon.owners.items() if owner == rank}
    held = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    if stage:
        pieces = optimizer.gradient_pieces()
        held = {name: pieces[p] for name, p in held.items()}
    both = sum(held[name].numel() for name in owned)
    sizes = (
        sum(s.box.numel for s in owned.values()),
        sum(p.numel() for p in held.values()),
    )
    return ledger.bytes_sent, ledger.bytes_received, *sizes, both


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_step_equal_the_formula(world, size, dtype):
    """Of uneven matrices, so that every rank has another number."""
    each, total = dtype.itemsize, sum(torch.Size(s).numel() for s in SHAPES)
    for sent, received, owned, *_ in world(size).run(traffic, "ddp", SHAPES, dtype):
        assert sent == (size - 1) * owned * each
        assert received == (total - owned) * each
    for sent, received, owned, *_ in world(size).run(traffic, "zero 1", SHAPES, dtype):
        assert sent == (total - owned) * 4 + (size - 1) * owned * each
        assert received == (size - 1) * owned * 4 + (total - owned) * each
    for kind in ("fsdp", *STAGES):
        everywhere, shards = 0, sum(-(-n // size) for n in BUCKETS)
        others = 2 * (size - 1) * shards * 4 if kind in STAGES else 0
        for sent, received, owned, held, both in world(size).run(
            traffic, kind, SHAPES, dtype
        ):
            assert sent == received == (held - both + owned - both) * each + others
            everywhere += sent - others
        assert everywhere <= 2 * (size - 1) / size * total * each


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_equal_matrices_are_those_of_an_all_gather(world, size):
    """ZeRO-1 adds the reduce-scatter: together what an all-reduce sends."""
    shapes = [(8, 16)] * (2 * size)
    total, dtype = 2 * size * 128, torch.float32
    for kind, passes in (("ddp", 1), ("zero 1", 2)):
        for sent, received, *_ in world(size).run(traffic, kind, shapes, dtype):
            assert sent * size == received * size == passes * (size - 1) * total * 4


# --- ZeRO-1 ---------------------------------------------------------------------------


def begun_unequal():
    """A model of which rank 0's values are copied."""
    model = Matrices(*SHAPES, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    return model


def clipped(micro_batches):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = begun_unequal()
    muon = Muon.of(model, gradient_reduction="average", **OPTIONS)
    norms, grads = [], []
    for step in range(3):
        for micro in range(micro_batches):
            loss_of(model, step, micro, rank).backward()
        muon.reduce_gradients()
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        grads.append(sum(g.numel() for g in kept))
        norms.append(clip_sharded_grad_norm_(kept, 0.5).item())
        muon.step()
        muon.zero_grad()
    return norms, grads, size, [p.detach() for p in model.parameters()]


def loss_of(model, step, micro, rank):
    pieces = []
    for number, parameter in enumerate(model.parameters()):
        seed = 1000 * step + 100 * micro + 10 * rank + number
        pieces.append((parameter * randn(*parameter.shape, seed=seed)).sum())
    return sum(pieces)


def clipped_in_zero(micro_batches, stage, once):
    """The same inside `ZeroOptimizer`; stage 2 keeps no whole gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = begun_unequal()
    optimizer = in_zero(model, stage, **OPTIONS)
    norms, grads = [], []
    for step in range(3):
        for micro in range(micro_batches):
            waits = once and micro < micro_batches - 1
            with optimizer.no_sync() if waits else nullcontext():
                loss_of(model, step, micro, rank).backward()
            whole = all(p.grad is not None for p in model.parameters())
            assert whole == (stage == 1 or waits)
        grads.append(sum(g.numel() for g in optimizer.gradient_pieces().values()))
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return norms, grads, size, [p.detach() for p in model.parameters()]


@pytest.mark.verifies(*SHARDED)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_zero_accumulates_clips_and_keeps_the_gradients_once(world, size):
    model = Matrices(*SHAPES, dtype=torch.float64)
    optimizer = Muon(model.parameters(), **OPTIONS)
    expected = []
    for step in range(3):
        for micro in range(2):
            for rank in range(size):
                (loss_of(model, step, micro, rank) / size).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    results = world(size).run(clipped, 2)
    for stage, once in ((1, False), (2, False), (2, True)):
        results += world(size).run(clipped_in_zero, 2, stage, once)
    total = sum(torch.Size(s).numel() for s in SHAPES)
    assert sum(grads[0] for _, grads, *_ in results) == 4 * total
    for norms, _, _, weights in results:
        assert norms == pytest.approx(expected, rel=1e-12)
        for found, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-9)


def sixteen_bits():
    """Rank 0 has two micro-batches, rank 1 one, rank 2 none."""
    model = Matrices((2, 3), dtype=torch.bfloat16)
    muon = Muon.of(model, gradient_reduction="sum")
    (weight,) = model.parameters()
    for factor in ([256.0, 1.0], [1.0], [])[dist.get_rank()]:
        (weight * factor).sum().backward()
    muon.reduce_gradients()
    return None if weight.grad is None else weight.grad.float().mean().item()


@pytest.mark.verifies(RANKS)
def test_gradients_of_sixteen_bits_are_summed_in_fp32(world):
    """256 + 1 + 1 is 256 in bfloat16, over micro-batches as over ranks."""
    assert sorted(world(3).run(sixteen_bits), key=str) == [258.0, None, None]


def with_masters(stage):
    model = Matrices(*SHAPES, dtype=torch.bfloat16)
    reference = Matrices(*SHAPES, dtype=torch.bfloat16).float()
    ours, theirs = in_zero(model, stage), Muon(reference.parameters())
    for step in range(STEPS):
        for number, (mine, whole) in enumerate(
            zip(model.parameters(), reference.parameters(), strict=True)
        ):
            drawn = randn(*mine.shape, seed=7 * step + number).bfloat16()
            (mine * drawn).sum().backward()  # equal on two ranks: the mean is exact
            whole.grad = drawn.float()
        ours.step()
        ours.zero_grad()
        theirs.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [torch.equal(mine, whole.bfloat16()) for mine, whole in pairs]


@pytest.mark.verifies(*SHARDED)
@pytest.mark.parametrize("stage", [1, 2])
def test_masters_in_fp32_are_stepped_as_one_process_steps_fp32(world, stage):
    for equal in world(2).run(with_masters, stage):
        assert all(equal), equal


def frozen(reduction):
    model = Matrices(*SHAPES)
    model.layers[1].weight.requires_grad_(False)
    layout = matrix_layout(model, gradient_reduction=reduction)
    muon = Muon(model.parameters(), layout=layout)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    muon.step()
    pairs = zip(model.parameters(), before, strict=True)
    return [not torch.equal(p, b) for p, b in pairs]


@pytest.mark.verifies(*VERIFIED)
def test_frozen_matrices_stay(world):
    for reduction in ("sum", None):
        for moved in world(2).run(frozen, reduction):
            assert moved == [True, False, True, True, True]


def on_copies():
    """Two copies of a model in shards over two ranks each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Matrices(*SHAPES, dtype=torch.float64)
    inner, outer = hybrid_groups(2)
    model = FullyShardedDataParallel(model, inner, replicate_group=outer)
    muon = Muon.of(model, **OPTIONS)
    names = dict(Matrices(*SHAPES, dtype=torch.float64).named_parameters())
    for step in range(2):
        for number, (name, piece, bounds) in enumerate(pieces_of(model)):
            gradient = randn(*names[name].shape, seed=10 * step + number)
            piece.grad = gradient.flatten()[bounds]
        muon.step()
    held = sum(s["momentum_buffer"].numel() for s in muon.state.values())
    return model.full_state_dict(), held, rank, size


@pytest.mark.verifies(*VERIFIED)
def test_hybrid_shards_are_stepped_as_by_one_process(world):
    """Of each shard one of the copies is read."""
    model = Matrices(*SHAPES, dtype=torch.float64)
    optimizer = Muon(model.parameters(), **OPTIONS)
    for step in range(2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = randn(*parameter.shape, seed=10 * step + number)
        optimizer.step()
    results = world(4).run(on_copies)
    assert sum(held for _, held, *_ in results) == sum(
        p.numel() for p in model.parameters()
    )
    for state, *_ in results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                state[name], parameter.detach(), rtol=0, atol=1e-9
            )


def in_a_group():
    number, group, index = my_group()
    model = Matrices(*SHAPES, dtype=torch.float64)
    muon = Muon.of(model, group, "sum", **OPTIONS)
    for step in range(2):
        loss_of(model, step, number, index).backward()
        muon.step()
        muon.zero_grad()
    return number, [p.detach() for p in model.parameters()]


@pytest.mark.verifies(*VERIFIED)
def test_groups_side_by_side_train_for_themselves(world):
    expected = []
    for number, size in enumerate((2, 3)):
        model = Matrices(*SHAPES, dtype=torch.float64)
        optimizer = Muon(model.parameters(), **OPTIONS)
        for step in range(2):
            for index in range(size):
                loss_of(model, step, number, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append(list(model.parameters()))
    for number, weights in world(5).run(in_a_group):
        for found, parameter in zip(weights, expected[number], strict=True):
            torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-9)


# --- checkpoints ----------------------------------------------------------------------


def save(run, changes, directory):
    training = Training(run, changes)
    training.train(0, 2)
    if run.wrapper == "fsdp":
        training.model.save_sharded(directory, 2, training.muon)
    elif run.wrapper in STAGES:
        training.muon.save_sharded(directory, 2, training.bare)
    else:
        save_checkpoint(directory, 2, training.bare.shards(), training.muon)


def load(run, changes, directory, expected):
    """Three more steps, with AdamW's state as at its first step."""
    training = Training(run, changes)
    if run.wrapper == "fsdp":
        training.model.load_sharded(directory, training.muon)
    elif run.wrapper in STAGES:
        training.muon.load_sharded(directory, training.bare)
    else:
        load_checkpoint(directory, training.bare.shards(), training.muon)
    training.train(2, STEPS)
    return training.error(expected), training.held()


def one_process_with_a_break(changes):
    """As after a load of Muon's state alone: AdamW begins anew."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    matrices, others = hidden_matrices(model)
    muon = Muon(matrices, **OPTIONS)
    for step in range(STEPS):
        if step in (0, 2):
            adamw = AdamW(others, lr=0.03)
        model.loss(*batch(step)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.verifies(*VERIFIED)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Run("fsdp", 3), Run("fsdp", 2)),
        (Run("fsdp", 1), Run("fsdp", 4)),
        (Run("ddp", 2), Run("fsdp", 3)),
        (Run("fsdp", 2), Run("zero 1", 3)),
        (Run("zero 1", 3), Run("plain", 1, tensor=2)),
        (Run("fsdp", 2, tensor=2), Run("ddp", 2)),
        (Run("stage 1", 4), Run("plain", 1)),
        (Run("plain", 1), Run("stage 2", 3)),
        (Run("stage 2", 2, tensor=2), Run("fsdp", 3)),
    ],
    ids=str,
)
def test_a_checkpoint_loads_into_any_other_layout(world, tmp_path, saved, loaded):
    expected = one_process_with_a_break(SMALL)
    world(saved.size).run(save, saved, SMALL, tmp_path)
    results = world(loaded.size).run(load, loaded, SMALL, tmp_path, expected)
    assert max(error for error, _ in results) < 1e-9
    model = XtrainModel(config_of(**SMALL))
    elements = sum(p.numel() for p in hidden_matrices(model)[0])
    assert sum(held for _, held in results) == elements


def own_state():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Matrices(*SHAPES)
    muon = Muon.of(model, gradient_reduction="sum")
    loss_of(model, 0, 0, rank).backward()
    muon.step()
    state = muon.state_dict()
    muon.load_state_dict(state)
    if rank == 0:
        state["ranks"] = (1, size)
    with pytest.raises(ValueError, match=f"rank 0: state of rank 1 of {size}"):
        muon.load_state_dict(state)


@pytest.mark.verifies(MUON)
def test_a_state_dict_is_of_its_own_rank(world):
    world(3).run(own_state)


# --- refused --------------------------------------------------------------------------


def refusals():
    rank = dist.get_rank()

    def refused(words, make):
        with pytest.raises(ValueError, match=words):
            make()

    model = Matrices(*SHAPES)
    layout, parameters = matrix_layout(model), list(model.parameters())
    if rank == 1:
        refused("rank 1: lr=-1", lambda: Muon(parameters, -1.0, layout=layout))
        refused("empty parameter list", lambda: Muon([], layout=layout))
        few = parameters[1:]
        stranger = [*few, nn.Parameter(torch.zeros(5, 12))]
    else:
        refused("rank 1: lr=-1", lambda: Muon(parameters, layout=layout))
        refused("empty parameter list", lambda: Muon(parameters, layout=layout))
        few = stranger = parameters
    refused("layout does not have", lambda: Muon(stranger, layout=layout))
    refused("ranks 0 and 1 have different", lambda: Muon(few, layout=layout))
    refused(
        "lr of group 0 is 0.1 and 1.1",
        lambda: Muon(parameters, lr=0.1 + rank, layout=layout),
    )
    refused(
        "ns_dtype",
        lambda: Muon.of(model, ns_dtype=[torch.float32, torch.float64][rank]),
    )
    refused("neither average nor sum", lambda: Muon.of(model, None, "mean"))
    muon = Muon(parameters, layout=layout)
    refused("when it is built", lambda: muon.add_param_group({"params": []}))
    wrapped = DistributedDataParallel(Matrices(*SHAPES))
    refused(
        "DistributedDataParallel reduces",
        lambda: Muon.of(wrapped, gradient_reduction="sum"),
    )
    sharded = FullyShardedDataParallel(Matrices(*SHAPES, (4,)))
    flat = sharded.parameters()
    refused("matrices, or stacks", lambda: Muon(flat, layout=matrix_layout(sharded)))
    model = Matrices(*SHAPES, (4,))

    def in_zero(skipped=1, **options):
        given = list(model.parameters())[:-1] if skipped else model.parameters()
        return ZeroOptimizer(given, Muon, lr=0.1, **options)

    layout = matrix_layout(model)
    refused("matrices, or stacks", lambda: in_zero(0, layout=layout))
    refused("without a layout", in_zero)
    refused(
        "layout is False and True",
        lambda: in_zero(layout=[None, layout][rank]),
    )
    refused("offload=True with a layout", lambda: in_zero(layout=layout, offload=True))
    few = layout._replace(shards=layout.shards[rank:])
    refused("rank 1: a parameter .* layout does not have", lambda: in_zero(layout=few))
    zero = in_zero(layout=layout)
    refused("all groups are given", lambda: zero.add_param_group({"params": []}))


@pytest.mark.verifies(*VERIFIED)
def test_bad_arguments_are_named_on_every_rank(world):
    world(2).run(refusals)


def slices():
    mesh = init_mesh((2,), ("tensor",))
    model = XtrainModel(config_of(**SMALL), mesh)
    with pytest.raises(ValueError, match="not slices"):
        Muon(hidden_matrices(model)[0])


@pytest.mark.verifies(MUON)
def test_slices_without_a_layout_are_refused(world):
    world(2).run(slices)
