"""Muon in one process: torch's, bit for bit; and how matrices are dealt to ranks."""

import math
from copy import deepcopy
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from xtrain.checkpoint.boxes import Box, boxes_of_range, overlap
from xtrain.zero import Muon, ZeroOptimizer, hidden_matrices, newton_schulz
from xtrain.zero.muon_routes import Held, deal

MUON = "xtrain.zero.muon:Muon"
NEWTON_SCHULZ = "xtrain.zero.newton_schulz:newton_schulz"
SHAPES = [(8, 8), (5, 12), (13, 4), (1, 7), (33, 48)]


def randn(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def train(make, dtype, steps=6, shapes=SHAPES):
    """Weights and momenta; the last matrix has no gradient in some steps."""
    weights = [nn.Parameter(randn(*s, dtype=dtype)) for s in shapes]
    optimizer = make(weights)
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad = randn(*weight.shape, seed=10 * step + number, dtype=dtype)
        if step % 3 == 1:
            weights[-1].grad = None
        optimizer.step()
    momenta = [optimizer.state[w]["momentum_buffer"] for w in weights]
    return [w.detach() for w in weights], momenta


@pytest.mark.verifies(MUON, NEWTON_SCHULZ)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "original"},
        {"ns_steps": 3, "eps": 0.5, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_are_torchs_bit_for_bit(options, dtype):
    """But for its 16-bit momentum without Nesterov, which torch divides in place."""
    if dtype is torch.bfloat16 and options.get("nesterov") is False:
        _, [square, *_] = train(lambda w: torch.optim.Muon(w, **options), dtype, 1)
        assert square.norm().item() == pytest.approx(1, rel=0.01)
        return
    ours = train(lambda w: Muon(w, **options), dtype)
    theirs = train(lambda w: torch.optim.Muon(w, **options), dtype)
    for found, expected in zip(chain(*ours), chain(*theirs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.verifies(MUON)
def test_state_goes_to_torch_and_back():
    given, theirs = (nn.Parameter(randn(5, 12)) for _ in range(2))
    one, other = Muon([given], lr=0.02), torch.optim.Muon([theirs], lr=0.5)
    for step in range(4):
        given.grad, theirs.grad = randn(5, 12, seed=step), randn(5, 12, seed=step)
        one.step()
        if step:
            other.step()
            assert torch.equal(given, theirs)
            one.load_state_dict(deepcopy(other.state_dict()))
        else:
            other.load_state_dict(deepcopy(one.state_dict()))
            theirs.data.copy_(given)


@pytest.mark.verifies(MUON)
@pytest.mark.parametrize("reduction", [None, "average"])
def test_a_layout_of_one_process_needs_no_group(reduction):
    def of(weights):
        model = nn.ParameterList(weights)
        return Muon.of(model, gradient_reduction=reduction, weight_decay=0.0)

    shapes = SHAPES[:-1]  # the last has no gradient at times, which counts as zero
    ours, _ = train(of, torch.float32, 3, shapes)
    theirs, _ = train(
        lambda w: torch.optim.Muon(w, weight_decay=0.0), torch.float32, 3, shapes
    )
    for found, expected in list(zip(ours, theirs, strict=True))[:-1]:
        assert torch.equal(found, expected)


@pytest.mark.verifies(NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 4, 9), (2, 9, 4)])
def test_singular_vectors_stay_and_values_go_through_the_polynomial(shape):
    matrices = randn(*shape)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    found = newton_schulz(matrices, dtype=torch.float64)
    expected = left @ torch.diag_embed(values) @ right
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert newton_schulz(torch.zeros(shape)).eq(0).all()


@pytest.mark.verifies(NEWTON_SCHULZ)
def test_five_steps_bring_singular_values_near_one():
    values = torch.logspace(math.log10(0.002), 0, 10_000, dtype=torch.float64)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    assert 0.68 < values.min() < 0.69 and 1.2 < values.max() < 1.21


@pytest.mark.verifies(MUON)
def test_a_stack_of_matrices_is_stepped_as_its_matrices_are():
    """Nothing passes from one to another, however large its gradient is."""
    sizes = torch.tensor([1e-3, 1.0, 1e3]).double()[:, None, None]
    stack = nn.Parameter(randn(3, 5, 12))
    each = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    options = {"lr": 0.02, "ns_dtype": torch.float64, "adjust_lr_fn": "original"}
    optimizers = [Muon([stack], **options), Muon(each, **options)]
    for step in range(5):
        stack.grad = randn(3, 5, 12, seed=step) * sizes
        for matrix, gradient in zip(each, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(list(each)), rtol=0, atol=1e-13)


@pytest.mark.verifies(MUON)
def test_groups_closures_and_schedules_work():
    weights = [nn.Parameter(randn(4, 6)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.0}, {"params": [weights[1]]}]
    optimizer = Muon(groups, lr=0.5, weight_decay=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    moved = []
    for _ in range(2):
        before = [w.detach().clone() for w in weights]

        def closure():
            optimizer.zero_grad()
            loss = sum((w * randn(4, 6, seed=3)).sum() for w in weights)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
        schedule.step()
        pairs = zip(weights, before, strict=True)
        moved.append([(w - b).norm().item() for w, b in pairs])
    assert moved[0][0] == moved[1][0] == 0
    assert moved[1][1] == pytest.approx(moved[0][1] / 2, rel=0.01)


@pytest.mark.verifies(MUON)
@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((4, 4), {"lr": -1.0}, "lr=-1.0"),
        ((4, 4), {"momentum": math.inf}, "momentum=inf"),
        ((4, 4), {"adjust_lr_fn": "rms"}, "'rms'"),
        ((4, 4), {"ns_steps": 100}, "ns_steps=100"),
        ((4, 4), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ((16,), {}, "shape \\[16\\] without a layout"),
        ((2, 2, 2, 2), {}, "without a layout"),
    ],
)
def test_what_is_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        Muon([nn.Parameter(torch.zeros(shape))], **options)


def inside_zero_optimizer():
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="not the flat shards of FSDP or ZeroOpt"):
        ZeroOptimizer([weight], Muon, lr=0.1)


@pytest.mark.verifies(MUON)
def test_flat_shards_are_refused(world):
    world(2).run(inside_zero_optimizer)


@pytest.mark.verifies("xtrain.zero.muon_layout:hidden_matrices")
def test_hidden_matrices_are_those_of_the_layers():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(7, 4),
            "layer": nn.Linear(4, 6),
            "frozen": nn.Linear(4, 6).requires_grad_(False),
            "conv": nn.Conv2d(2, 3, 3),
            "lm_head": nn.Linear(6, 7, bias=False),
        }
    )
    model.experts = nn.Parameter(torch.zeros(3, 4, 6))
    matrices, others = hidden_matrices(model)
    names = {p: name for name, p in model.named_parameters()}
    assert [names[p] for p in matrices] == ["experts", "layer.weight"]
    assert [names[p] for p in others] == [
        "embed.weight", "layer.bias", "conv.weight", "conv.bias", "lm_head.weight",
    ]  # fmt: skip


# --- dealing --------------------------------------------------------------------------


def whole(shape) -> Held:
    return Held(shape, (Box((0,) * len(shape), shape),))


@pytest.mark.verifies("xtrain.zero.muon_routes:deal")
def test_copies_are_dealt_by_work():
    """Tall and wide cost alike; a large matrix weighs more than its elements."""
    shapes = {"a": (8, 8), "b": (8, 16), "c": (16, 8), "d": (16, 16), "e": (1, 256)}
    held = {name: whole(shape) for name, shape in shapes.items()}
    found, [only] = deal([held, held], 0)
    owners = {stack.name: owner for stack, owner in found.items()}
    assert owners == {"d": 0, "b": 1, "c": 1, "a": 1, "e": 1}
    assert {r.source == r.target for r in only.gather} == {True}
    assert [r.target for r in only.scatter if r.source == 0].count(1) == 1


@pytest.mark.verifies("xtrain.zero.muon_routes:deal")
def test_a_round_has_matrices_of_every_rank_up_to_so_many_elements():
    held = {name: whole((4, 4)) for name in "abcdefg"}
    for elements, expected in ((1, [3, 3, 1]), (48, [3, 3, 1]), (49, [6, 1])):
        owners, rounds = deal([held] * 3, 1, elements)
        assert len(owners) == 7
        assert [len(turn.scatter) for turn in rounds] == [
            n + 2 * sum(owners[s] == 1 for s in {r.stack for r in turn.scatter})
            for n, turn in zip(expected, rounds, strict=True)
        ]


@pytest.mark.verifies("xtrain.zero.muon_routes:deal")
def test_experts_on_one_rank_are_one_batch():
    shape = (5, 2, 3)
    flat = [boxes_of_range(shape, *bounds) for bounds in [(0, 15), (15, 30)]]
    owners, _ = deal([{"e": Held(shape, tuple(boxes))} for boxes in flat], 0)
    sizes = [(s.box.offset[0], s.box.size[0], o) for s, o in owners.items()]
    assert sorted(sizes) == [(0, 2, 0), (2, 1, 0), (3, 2, 1)]
    experts = [Held(shape, (Box((o, 0, 0), (n, 2, 3)),)) for o, n in [(0, 3), (3, 2)]]
    owners, _ = deal([{"e": held} for held in experts], 0)
    assert {s.box.size[0]: o for s, o in owners.items()} == {3: 0, 2: 1}


@pytest.mark.verifies("xtrain.zero.muon_routes:deal")
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
    st.lists(st.integers(0, 64), max_size=3),
    st.integers(1, 2),
)
def test_every_element_is_read_once_and_reaches_all_who_hold_it(shape, cuts, copies):
    shape = tuple(shape)
    cuts = sorted(min(cut, math.prod(shape)) for cut in cuts)
    bounds = list(zip([0, *cuts], [*cuts, math.prod(shape)], strict=True)) * copies
    held = [{"w": Held(shape, tuple(boxes_of_range(shape, *b)))} for b in bounds]
    read, updated = torch.zeros(shape), [torch.zeros(shape) for _ in held]
    for rank in range(len(held)):
        owners, rounds = deal(held, rank, elements=8)
        for route in (r for turn in rounds for r in turn.gather):
            assert owners[route.stack] == route.target
            if route.source == rank:
                read[route.box.slices_in(Box((0,) * len(shape), shape))] += 1
        for route in (r for turn in rounds for r in turn.scatter):
            if route.target == rank:
                assert any(
                    overlap(b, route.box) == route.box for b in held[rank]["w"][1]
                )
                updated[rank][route.box.slices_in(Box((0,) * len(shape), shape))] += 1
    assert read.eq(1).all()
    for rank, (first, last) in enumerate(bounds):
        flat = updated[rank].flatten()
        assert flat[first:last].eq(1).all() and flat.sum() == last - first


@pytest.mark.verifies("xtrain.zero.muon_routes:deal")
@pytest.mark.parametrize(
    ("second", "words"),
    [(Box((2, 0), (1, 3)), "is in no piece"), (Box((1, 0), (3, 3)), "two pieces")],
)
def test_pieces_that_do_not_fit_are_refused(second, words):
    boxes = Box((0, 0), (2, 3)), second
    with pytest.raises(ValueError, match=f"w \\[4, 3\\].*{words}"):
        deal([{"w": Held((4, 3), (box,))} for box in boxes], 0)
