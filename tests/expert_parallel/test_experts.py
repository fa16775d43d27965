"""Experts on sorted rows: backward by hand, by autograd, and row by row in float64."""

import pytest
import torch
from torch import nn

from tests.expert_parallel import reference
from xtrain.expert_parallel import (
    Experts,
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_forward,
)
from xtrain.expert_parallel.experts import check_experts, routed_mlp
from xtrain.expert_parallel.routing import sort_copies, weighted_sum

MODULE = "xtrain.expert_parallel.experts"
MLP = f"{MODULE}:expert_mlp"
FUNCTION = f"{MODULE}:_ExpertMLP"
SAVED = f"{MODULE}:SavedExperts"
BY_HAND = [f"{MODULE}:expert_mlp_forward", f"{MODULE}:expert_mlp_backward"]
MODULE_ = f"{MODULE}:Experts"
EXPERTS, HIDDEN, INNER = 4, 6, 5
COUNTS = ([3, 1, 4, 2], [0, 5, 0, 1], [0, 0, 7, 0], [0, 0, 0, 0])
WAYS = ["loop", "padded", None]


def made(counts: list[int]) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Rows, the three weights, the gradient of the output."""
    w = reference.weights(EXPERTS, HIDDEN, INNER)
    rows = sum(counts)
    return (
        reference.tokens(rows, HIDDEN),
        [w["gate"], w["up"], w["down"]],
        reference.tokens(rows, HIDDEN, seed=1),
    )


def truth(counts: list[int]) -> list[torch.Tensor]:
    """y, dx and the three weights' gradients, row by row with autograd."""
    x, weights, grad = made(counts)
    x, weights = x.requires_grad_(), [w.requires_grad_() for w in weights]
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    outputs = [
        reference.swiglu(x[row], *(w[expert] for w in weights))
        for row, expert in enumerate(experts)
    ]
    y = torch.stack(outputs) if outputs else x * weights[0].sum() * 0
    for w in weights:
        y = y + 0 * w.sum()
    y.backward(grad)
    return [y.detach(), x.grad, *(w.grad for w in weights)]


def close(found, expected, **limits) -> None:
    limits = limits or {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(found, expected, **limits)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.verifies(*BY_HAND, SAVED)
def test_forward_and_backward_by_hand(path, counts):
    x, weights, grad = made(counts)
    y, saved = expert_mlp_forward(x, torch.tensor(counts), *weights, path)
    close([y, *expert_mlp_backward(grad, saved)], truth(counts))
    close([x, *weights], [made(counts)[0], *made(counts)[1]], rtol=0, atol=0)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("how", [*WAYS, "autograd"])
@pytest.mark.verifies(MLP, MODULE_, FUNCTION)
def test_a_module_of_experts_trains_either_way(how, counts):
    x, weights, grad = made(counts)
    options = {"backward": "autograd"} if how == "autograd" else {"path": how}
    experts = Experts(EXPERTS, HIDDEN, INNER, dtype=torch.float64, **options)
    names = ["gate_proj", "up_proj", "down_proj"]
    assert [name for name, _ in experts.named_parameters()] == names
    with torch.no_grad():
        for parameter, weight in zip(experts.parameters(), weights, strict=True):
            parameter.copy_(weight)
    y = experts(x.requires_grad_(), torch.tensor(counts))
    y.backward(grad)
    found = [y.detach(), x.grad, *(p.grad for p in experts.parameters())]
    close(found, truth(counts))


@pytest.mark.parametrize("how", [*WAYS, "grouped", "autograd"])
@pytest.mark.verifies(MLP)
def test_autocast_computes_in_its_dtype_and_leaves_float64_alone(how):
    counts = [3, 0, 4, 2]
    options = {"backward": "autograd"} if how == "autograd" else {"path": how}
    w = reference.weights(EXPERTS, 8, 16)
    x, weights = reference.tokens(9, 8), [w["gate"], w["up"], w["down"]]
    grad = reference.tokens(9, 8, seed=1)
    of_dtype = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        if dtype == torch.float64 and how == "grouped":
            continue
        mine = [t.to(dtype).requires_grad_() for t in (x, *weights)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.bfloat16):
            y = expert_mlp(mine[0], torch.tensor(counts), *mine[1:], **options)
        assert y.dtype == torch.promote_types(torch.bfloat16, dtype) or (
            dtype == torch.float32 and y.dtype == torch.bfloat16
        )
        y.backward(grad.to(y.dtype))
        assert [t.grad.dtype for t in mine] == [dtype] * 4
        of_dtype[dtype] = [y.detach(), *(t.grad for t in mine)]
    for cast, plain in zip(of_dtype[torch.float32], of_dtype[torch.bfloat16]):  # noqa: B905
        close(cast.bfloat16(), plain, rtol=0, atol=0)
    if torch.float64 in of_dtype:
        experts = [e for e, count in enumerate(counts) for _ in range(count)]
        for row, e in enumerate(experts):
            alone = reference.swiglu(x[row], *(t[e] for t in weights))
            close(of_dtype[torch.float64][0][row], alone)


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.verifies(MLP)
def test_a_gradient_that_is_not_contiguous_and_one_that_is_expanded(path):
    counts = [3, 0, 4, 2]
    x, weights, _ = made(counts)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expert_mlp(mine, torch.tensor(counts), *weights, path).sum().backward()
    y = expert_mlp(other, torch.tensor(counts), *weights, path)
    y.backward(torch.ones(HIDDEN, 9, dtype=torch.float64).t())
    expected = expert_mlp_forward(x, torch.tensor(counts), *weights)[1]
    dx = expert_mlp_backward(torch.ones_like(x), expected)[0]
    close(mine.grad, dx)
    close(other.grad, dx)


@pytest.mark.verifies(MLP)
def test_frozen_experts_still_give_the_gradient_of_the_rows():
    counts = [3, 1, 4, 2]
    x, weights, grad = made(counts)
    y = expert_mlp(x.requires_grad_(), torch.tensor(counts), *weights)
    y.backward(grad)
    close(x.grad, truth(counts)[1])
    assert all(w.grad is None for w in weights)


TABLES = {  # which experts each token has, and which copies are dropped
    "all kept": ([[0, 1], [3, 0], [1, 3]], []),
    "one dropped": ([[0, 1], [3, 0], [1, 3]], [(1, 1)]),
    "a token without experts": ([[0, 1], [3, 0], [1, 3]], [(2, 0), (2, 1)]),
    "nothing kept": ([[0, 1]], [(0, 0), (0, 1)]),
    "no tokens": ([], []),
    "one expert a token": ([[2], [0], [2], [2]], []),
}


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.verifies(f"{MODULE}:routed_mlp", f"{MODULE}:to_table")
def test_tokens_to_tokens_is_index_experts_and_weighted_sum(case, path):
    table, dropped = TABLES[case]
    k = len(table[0]) if table else 2
    experts_Tk = torch.tensor(table, dtype=torch.int64).view(-1, k)
    kept_Tk = torch.ones_like(experts_Tk, dtype=torch.bool)
    for place in dropped:
        kept_Tk[place] = False
    counts_E = torch.bincount(experts_Tk[kept_Tk], minlength=EXPERTS)
    copies_M = sort_copies(experts_Tk, kept_Tk, counts_E)
    tokens = len(table)
    generator = torch.Generator().manual_seed(3)
    gates = torch.rand(
        tokens, k, generator=generator, dtype=torch.float64, device="cpu"
    )
    _, weights, _ = made([])
    inputs = [reference.tokens(tokens, HIDDEN), gates, *weights]
    grad = reference.tokens(tokens, HIDDEN, seed=1)

    def run(layer) -> list[torch.Tensor]:
        mine = [t.clone().requires_grad_() for t in inputs]
        before = [t.detach().clone() for t in mine]
        y = layer(*mine)
        (y * grad).sum().backward()
        assert all(map(torch.equal, mine, before)), "inputs are as they were"
        return [y.detach(), *(t.grad for t in mine)]

    def in_pieces(x, gates, *weights):
        rows = expert_mlp(x[copies_M // k], counts_E, *weights, backward="autograd")
        return weighted_sum(rows, gates, copies_M)

    found = run(lambda x, g, *w: routed_mlp(x, g, copies_M, counts_E, *w, path))
    for one, other in zip(found, run(in_pieces), strict=True):
        close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.verifies(MODULE_)
def test_experts_begin_as_linear_layers_do():
    torch.manual_seed(0)
    experts = Experts(50, 40, 90)
    linear = {name: nn.Linear(40, 90) for name in ("gate_proj", "up_proj")}
    linear["down_proj"] = nn.Linear(90, 40)
    for name, layer in linear.items():
        weight = getattr(experts, name)
        assert weight.shape == (50, *layer.weight.shape)
        bound = layer.weight.abs().max().item()
        assert weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
        assert weight.std().item() == pytest.approx(layer.weight.std().item(), rel=0.05)


WRONG = {
    "no experts": ((0, 4, 4, "by_hand"), "num_experts=0"),
    "half a size": ((2, 4.0, 4, "by_hand"), "hidden_size=4.0"),
    "yes": ((2, 4, True, "by_hand"), "intermediate_size=True"),
    "negative": ((2, 4, -1, "by_hand"), "intermediate_size=-1"),
    "another backward": ((2, 4, 4, "magic"), "backward='magic' is neither"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.verifies(f"{MODULE}:check_experts")
def test_what_can_be_no_experts_is_refused(case):
    (*sizes, backward), message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        check_experts(*sizes, backward)
    with pytest.raises(ValueError, match=message):
        Experts(*sizes, backward=backward)
