"""Claims of the interview page of lc3, each run with and without its cause."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.training import batch_of, loss_of, make_model, wrapped
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import collectives_named
from xtrain.data_parallel import DistributedDataParallel
from xtrain.data_parallel.replicas import digest
from xtrain.zero import AdamW
from xtrain.zero.flat import FlatLayout


def ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# --------------------------------------------------- does ZeRO divide the computation?


def work(stage):
    """Operations of forward and backward; elements that the optimizer steps."""
    rank, _ = ranks()
    model, optimizer = wrapped(stage, make_model(0, dtype=torch.float32))
    inner = getattr(optimizer, "optimizer", optimizer)  # without its markers
    stepped = sum(p.numel() for g in inner.param_groups for p in g["params"])
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch_of(0, 0, rank)).backward()
    return counter.get_total_flops(), stepped


@pytest.mark.verifies("xtrain.zero.fsdp:FullyShardedDataParallel")
def test_every_rank_computes_its_whole_batch_in_every_stage(world):
    size = 3
    whole = world(size).run(work, 0)
    parameters = whole[0][1]
    assert min(flops for flops, _ in whole) > 0
    for stage in (1, 2, 3):
        for (flops, stepped), (expected, _) in zip(
            world(size).run(work, stage), whole, strict=True
        ):
            assert flops == expected
            assert stepped <= parameters / size + 10  # padding aside


# ------------------------------------------- data parallelism keeps the state N times


def state_after_three_steps(optimizer_class, averaged):
    """Digests of Adam's state after steps on this rank's own data."""
    rank, _ = ranks()
    model = make_model(0)
    wrapped = DistributedDataParallel(model) if averaged else model
    optimizer = optimizer_class(model.parameters(), lr=0.02)
    for step in range(3):
        loss_of(wrapped, batch_of(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        {name: digest(torch.as_tensor(value)) for name, value in state.items()}
        for state in optimizer.state.values()
    ]


@pytest.mark.verifies("xtrain.zero.adam:Adam")
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW])
def test_the_state_of_adam_is_the_same_on_all_ranks(world, optimizer_class):
    """First and second moment and step of every parameter, bit for bit."""
    first, *others = world(3).run(state_after_three_steps, optimizer_class, True)
    assert len(first) == len(list(make_model(0).parameters()))
    assert all({"exp_avg", "exp_avg_sq", "step"} <= state.keys() for state in first)
    assert all(other == first for other in others)
    first, *others = world(3).run(state_after_three_steps, optimizer_class, False)
    assert all(other != first for other in others)  # their data did differ


# ------------------------------------------- what data parallelism and the stages call


def step_of(stage, collectives):
    """Calls of backward and of the step, and bytes sent, of one training step."""
    rank, _ = ranks()
    torch.manual_seed(0)
    options = {"collectives": collectives_named(collectives)}
    if stage == 3:
        options["blocks"] = [nn.Linear]
    bare = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)])
    model, optimizer = wrapped(stage, bare, **options)
    rows = torch.ones(2, 12) * rank
    with CommLedger() as forward:
        loss = model(rows).square().sum()
    with CommLedger() as backward:
        loss.backward()
    with CommLedger() as step:
        optimizer.step()
    ledgers = (forward, backward, step)
    calls = [{kind_of(e.op) for e in ledger.events} for ledger in ledgers]
    sent = sum(e.nbytes or 0 for w in ledgers for e in w.events if e.kind == "send")
    return calls, sent


def kind_of(op: str) -> str:
    """torch's names differ by version; a reduce-scatter has "scatter" in all."""
    names = {
        "scatter": "reduce-scatter",
        "gather": "all-gather",
        "reduce": "all-reduce",
    }
    return next((kind for name, kind in names.items() if name in op), "message")


@pytest.mark.parametrize("size", [2, 3])
def test_each_stage_calls_the_collectives_of_its_name(world, size):
    """DDP all-reduces; stages 1 and 2 scatter and gather; stage 3 gathers twice."""
    expected = {
        0: (set(), {"all-reduce"}, set()),
        1: (set(), set(), {"reduce-scatter", "all-gather"}),
        2: (set(), {"reduce-scatter"}, {"all-gather"}),
        3: ({"all-gather"}, {"all-gather", "reduce-scatter"}, set()),
    }
    for stage, kinds in expected.items():
        for calls, _ in world(size).run(step_of, stage, "torch"):
            assert tuple(calls) == kinds, stage


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_sends_two_passes_over_the_parameters_and_stage_3_three(world, size):
    phi = 4 * 3 * (12 * 12 + 12)  # bytes
    once = phi * (size - 1) // size
    for stage, passes in ((0, 2), (1, 2), (2, 2), (3, 3)):
        flag = passes * 4 if stage == 0 else 0  # DDP's last bucket has an element more
        for _, sent in world(size).run(step_of, stage, "ring"):
            assert 0 <= sent - passes * once <= flag, stage


# ------------------------------------------------------- what 16-bit numbers can hold


def test_bf16_loses_updates_below_a_512th_and_keeps_those_above_a_128th():
    """Every bf16 number from 1 to 2 in steps of 2**-7, one update down."""
    weights = 1 + torch.arange(1, 128, dtype=torch.float64) / 128
    assert torch.equal(weights.bfloat16().double(), weights)

    def moved(update: Tensor) -> Tensor:
        return (weights - update).bfloat16().double() != weights

    assert not moved(weights * 0.999 * 2**-9).any()
    assert moved(weights * 1.001 * 2**-8).all()
    some = moved(weights * 1.4 * 2**-9)  # in between it depends on the weight
    assert some.any()
    assert not some.all()


def test_a_step_of_one_ten_thousandth_moves_small_bf16_weights_and_no_large_one():
    """Above 0.0512 none moves, below 0.0256 all do: 1e-4 times 2**9 and 2**8."""
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    weights = every.view(torch.bfloat16)  # all that are positive, in order
    weights = weights[weights.isfinite() & (weights > 1e-3) & (weights < 100)].double()
    moves = (weights - 1e-4).bfloat16().double() != weights
    assert not moves[weights > 1e-4 * 2**9].any()
    assert moves[weights < 1e-4 * 2**8].all()
    assert moves[(weights - 0.02).abs().argmin()]


def test_the_three_formats():
    """The table of the page on mixed precision."""
    for dtype, mantissa, largest in (
        (torch.float32, 23, "3.4e+38"),
        (torch.bfloat16, 7, "3.4e+38"),
        (torch.float16, 10, "65504"),
    ):
        info, one = torch.finfo(dtype), torch.ones((), dtype=dtype)
        below = torch.nextafter(one, one.new_zeros(())).double()
        assert info.eps == 2.0**-mantissa
        assert 1 - below == 2.0 ** -(mantissa + 1)
        digits = 2 if dtype != torch.float16 else 5
        assert f"{info.max:.{digits}g}" == largest


def test_small_gradients_vanish_in_fp16_and_not_in_bf16():
    small = torch.tensor(1e-8, dtype=torch.float64)
    assert small.half() == 0
    assert small.bfloat16() > 0
    assert torch.finfo(torch.float16).smallest_normal == 2.0**-14
    assert torch.tensor(2.0**-24).half() > 0  # the last one; a half of it is 0
    assert torch.tensor(2.0**-25).half() == 0
    assert torch.tensor(1.001 * 2.0**-25).half() == 2.0**-24  # to the nearest: up
    exponents = torch.finfo(torch.float32).smallest_normal
    assert torch.finfo(torch.bfloat16).smallest_normal == exponents


# ------------------------------------- optimizers that look at more than one element


def pieces_of(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    """Each rank's pieces of some tensors laid end to end."""
    layout = FlatLayout([t.shape for t in tensors], size)
    flat = torch.zeros(layout.padded_numel, dtype=tensors[0].dtype)
    for view, tensor in zip(layout.views(flat), tensors, strict=True):
        view.copy_(tensor)
    return [layout.pieces(layout.shard(flat, rank), rank) for rank in range(size)]


def orthogonal(matrix: Tensor) -> Tensor:
    """What Muon steps with: the matrix with all singular values set to 1."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


@pytest.mark.parametrize("size", [2, 3])
def test_norms_need_a_sum_over_the_pieces_and_matrices_the_whole(size):
    torch.manual_seed(0)
    tensors = [torch.randn(6, 4).double(), torch.randn(7).double()]
    pieces = pieces_of(tensors, size)
    for number, tensor in enumerate(tensors):
        squares = torch.stack([rank[number].square().sum() for rank in pieces])
        assert squares.sum().sqrt() == pytest.approx(tensor.norm().item())
        if number == 0:  # the first is cut: no rank has its norm
            assert squares.max().sqrt() < 0.95 * tensor.norm()
    # Adafactor's column means: every rank's rows give another answer.
    rows = tensors[0].square().tensor_split(size)
    means = torch.stack([part.sum(0) for part in rows]).sum(0) / 6
    torch.testing.assert_close(means, tensors[0].square().mean(0))
    assert not torch.allclose(rows[0].mean(0), means, rtol=0.1)
    # Muon's matrix: the rows of the result are not the result of the rows.
    half = 6 // size
    assert not torch.allclose(
        orthogonal(tensors[0])[:half], orthogonal(tensors[0][:half]), rtol=0.1
    )


def test_elements_can_be_stepped_anywhere():
    """Adam on the pieces is Adam on the tensors, bit for bit."""
    torch.manual_seed(0)
    shapes = [(6, 4), (7,)]
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    cut = [
        nn.Parameter(piece.clone())
        for rank in pieces_of([p.detach() for p in whole], 3)
        for piece in rank
    ]
    optimizers = AdamW(whole, lr=0.1), AdamW(cut, lr=0.1)
    for _ in range(3):
        for parameter in whole:
            parameter.grad = torch.randn_like(parameter)
        grads = [g for rank in pieces_of([p.grad for p in whole], 3) for g in rank]
        for parameter, grad in zip(cut, grads, strict=True):
            parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    expected = [p for rank in pieces_of([p.detach() for p in whole], 3) for p in rank]
    assert all(map(torch.equal, cut, expected))
