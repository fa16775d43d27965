"""Activation recompute equals no recompute, bit by bit, and keeps less.

Every case is run with our checkpoint, with the whiteboard form inside its limits, and
with torch's own, and compared with the plain call: outputs and every gradient.
"""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.devices import device_type, randn
from xtrain.copying.forms import forms
from xtrain.pipeline_parallel import checkpoint
from xtrain.testing.saved import SavedTensors
from xtrain.whiteboard.pipeline_parallel.checkpoint import checkpoint as on_a_page

LIBRARY = "xtrain.pipeline_parallel.recompute:checkpoint"
PIECES = [
    "xtrain.pipeline_parallel.recompute:_Call",
    "xtrain.pipeline_parallel.recompute:_recomputed",
    "xtrain.pipeline_parallel.recompute:_KeepInputs",
    "xtrain.pipeline_parallel.surroundings:Surroundings",
]
ON_A_PAGE = "xtrain.whiteboard.pipeline_parallel.checkpoint:checkpoint"
FORMS = {
    "library": checkpoint,
    "whiteboard": on_a_page,
    "torch": partial(torch_checkpoint, use_reentrant=False),
}


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return randn(*shape, generator=generator)


def network(*, dropout=0.0):
    """The same weights whenever it is called."""
    torch.manual_seed(7)
    parts = [nn.Linear(4, 9), nn.GELU(), nn.Dropout(dropout), nn.Linear(9, 4)]
    return nn.Sequential(*parts).double()


def gradients(*tensors):
    return [tensor.grad for tensor in tensors]


# ---------------------------------------------------------- cases that all forms can do


def leaf_input(recompute):
    net, x = network(), numbers(3, 4).requires_grad_()
    y = recompute(net, x)
    y.square().sum().backward()
    return [y, *gradients(x, *net.parameters())]


def non_leaf_input(recompute):
    net, first, x = network(), network(), numbers(3, 4).requires_grad_()
    y = recompute(net, first(x).tanh())
    y.square().sum().backward()
    return [y, *gradients(x, *net.parameters(), *first.parameters())]


def no_input_needs_a_gradient(recompute):
    net, x = network(), numbers(3, 4)
    y = recompute(net, x)
    y.square().sum().backward()
    return [y, *gradients(*net.parameters())]


def integers_in(recompute):
    table, ids = nn.Embedding(5, 4, dtype=torch.float64), torch.tensor([[1, 4], [4, 0]])
    with torch.no_grad():
        table.weight.copy_(numbers(5, 4, seed=3))
    y = recompute(table, ids)
    y.square().sum().backward()
    return [y, table.weight.grad]


def arguments_that_are_no_tensors(recompute):
    def power(x, exponent, nothing, words):
        assert nothing is None and words == "words"
        return x**exponent

    x = numbers(3, 4).requires_grad_()
    y = recompute(power, x, 3, None, "words")
    y.sum().backward()
    return [y, x.grad]


def several_outputs(recompute):
    """Used, unused, whole numbers, and detached."""

    def parts(x, w):
        y = x @ w
        return y.sin(), y.exp(), y.argmax(-1), y.cos().detach()

    x, w = numbers(3, 4).requires_grad_(), numbers(4, 2, seed=1).requires_grad_()
    used, unused, places, detached = recompute(parts, x, w)
    (used * detached + places[:, None]).square().sum().backward()
    return [used, unused, places, detached, *gradients(x, w)]


def one_tensor_twice(recompute):
    x = numbers(3, 4).requires_grad_()
    h = x.tanh()
    y = recompute(lambda a, b: a.sin() * b.exp() + a * b, h, h)
    y.sum().backward()
    z = recompute(lambda a, b: a.sin() * b.exp() + a * b, x, x)
    z.sum().backward()
    return [y, z, x.grad]


def an_output_that_is_the_input(recompute):
    x, w = numbers(3, 4).requires_grad_(), numbers(3, 4, seed=1).requires_grad_()
    h = x.exp()
    same, other = recompute(lambda a, b: (a, a * b), h, w)
    view = recompute(lambda a: a.view(2, 6), h)
    (same * other + view.view(3, 4).sin() + h).sum().backward()
    return [same, other, view, *gradients(x, w)]


def dropout(recompute):
    net, x = network(dropout=0.5), numbers(3, 4).requires_grad_()
    torch.manual_seed(1)
    y = recompute(net, x)
    z = recompute(net, y) + torch.rand(3, 4)
    z.square().sum().backward()
    return [y, z, torch.rand(4), *gradients(x, *net.parameters())]


def backward_while_others_draw(recompute):
    """Two forwards, then their backwards in the other order, as in a pipeline."""
    net, x = network(dropout=0.5), numbers(3, 4).requires_grad_()
    torch.manual_seed(1)
    first, second = recompute(net, x), recompute(net, x.sin())
    second.square().sum().backward()
    noise = torch.rand(3, 4)
    (first * noise).sum().backward()
    return [first, second, noise, *gradients(x, *net.parameters())]


def one_within_another(recompute):
    inner, net, x = network(dropout=0.5), network(), numbers(3, 4).requires_grad_()

    def outer(a):
        h = recompute(net, a.sin())
        h = recompute(lambda b: recompute(inner, b.mul(2)).tanh(), h)
        return recompute(net, h).exp()

    torch.manual_seed(1)
    y = recompute(outer, x * 2)
    y.sum().backward()
    return [y, torch.rand(2), *gradients(x, *net.parameters(), *inner.parameters())]


def frozen_parameters(recompute):
    net, x = network(), numbers(3, 4).requires_grad_()
    net[0].requires_grad_(False)
    y = recompute(net, x)
    y.square().sum().backward()
    assert net[0].weight.grad is None
    return [y, *gradients(x, *net[3].parameters())]


CASES = [
    leaf_input, non_leaf_input, no_input_needs_a_gradient, integers_in,
    arguments_that_are_no_tensors, several_outputs, one_tensor_twice,
    an_output_that_is_the_input, dropout, backward_while_others_draw,
    one_within_another, frozen_parameters,
]  # fmt: skip

# ----------------------------------------------------- cases beyond the whiteboard form


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def keywords_and_nested_inputs(recompute):
    def mix(x, pairs, *, scale, more=None):
        (a, b), named = pairs
        total = x * a + b["weight"] * named.left - named.right[0]
        return total * scale + more["list"][1]

    x, a, b, c, d, e, scale = (numbers(3, 4, seed=i).requires_grad_() for i in range(7))
    pairs = ((a, {"weight": b}), Pair(c, [d, None]))
    y = recompute(mix, x, pairs, scale=scale.sin(), more={"list": [1, e]})
    y.square().sum().backward()
    return [y, *gradients(x, a, b, c, d, e, scale)]


def nested_outputs(recompute):
    def split(x):
        return {"a": [x.sin(), x.shape], "b": Pair(x.exp(), (x.cos(), 3, x.max(0)))}

    x = numbers(3, 4).requires_grad_()
    found = recompute(split, x * 1)
    sine, shape = found["a"]
    exponential, (cosine, three, top) = found["b"]
    assert shape == (3, 4) and three == 3
    y = sine * exponential + cosine * top.values
    y.sum().backward()
    return [y, top.indices, x.grad]


def containers_that_the_function_empties(recompute):
    def drain(tensors, named):
        return tensors.pop().sin() * tensors.pop().exp() * named.pop("x").cos()

    x, y, z = (numbers(3, seed=i).requires_grad_() for i in range(3))
    out = recompute(drain, [x, y], {"x": z})
    out.sum().backward()
    return [out, *gradients(x, y, z)]


def gradients_without_backward(recompute):
    net, x = network(), numbers(3, 4).requires_grad_()
    y = recompute(net, x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]


def some_gradients_first(recompute):
    """The input's, then the weights', of one graph."""
    net, x = network(dropout=0.5), numbers(3, 4).requires_grad_()
    torch.manual_seed(1)
    loss = recompute(net, x).square().sum()
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    weights = torch.autograd.grad(loss, list(net.parameters()))
    return [dx, *weights]


def twice_over_one_graph(recompute):
    net, x = network(dropout=0.5), numbers(3, 4).requires_grad_()
    torch.manual_seed(1)
    loss = recompute(net, x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss, *gradients(x, *net.parameters())]


def higher_derivatives(recompute):
    x = numbers(3).requires_grad_()
    y = recompute(lambda a: a.sin() * a.exp(), x * 1)
    found = [y]
    for _ in range(3):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return found


def a_gradient_within(recompute):
    """The function itself asks for a gradient, before forward has ended."""

    def slope(a):
        (g,) = torch.autograd.grad((a.sin() * a.exp()).sum(), a, create_graph=True)
        return g * a

    x = numbers(3).requires_grad_()
    y = recompute(slope, x * 1)
    y.sum().backward()
    return [y, x.grad]


CASES_BEYOND = [
    keywords_and_nested_inputs, nested_outputs, a_gradient_within,
    gradients_without_backward, some_gradients_first, twice_over_one_graph,
    higher_derivatives,
]  # fmt: skip


CASES_OF_OURS = [containers_that_the_function_empties]


def equal(found, expected, tolerance=0.0):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.verifies(LIBRARY, *PIECES, ON_A_PAGE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_plain_call(case, form):
    # the page has another graph, which adds gradients in another order
    equal(case(FORMS[form]), case(plain), 1e-14 if form == "whiteboard" else 0)


@pytest.mark.verifies(LIBRARY, *PIECES)
@pytest.mark.parametrize("form", ["library", "torch"])
@pytest.mark.parametrize("case", CASES_BEYOND)
def test_so_they_are_with_any_arguments_and_any_backward(case, form):
    equal(case(FORMS[form]), case(plain))


@pytest.mark.verifies(LIBRARY)
@pytest.mark.parametrize("case", CASES_OF_OURS)
def test_so_they_are_where_torchs_checkpoint_fails(case):
    equal(case(checkpoint), case(plain))
    with pytest.raises((IndexError, RuntimeError)):
        case(FORMS["torch"])


def train(recompute, steps=6):
    """Weights after some steps of a model with dropout and a shared block."""
    torch.manual_seed(0)
    first, shared, last = network(dropout=0.3), network(dropout=0.3), network()
    with torch.no_grad():
        last[0].weight.mul_(0.5)
    parameters = [*first.parameters(), *shared.parameters(), *last.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    for step in range(steps):
        h = recompute(first, numbers(5, 4, seed=step))
        for _ in range(2):
            h = h + recompute(shared, h)
        loss = F.mse_loss(last(h), numbers(5, 4, seed=-1 - step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.verifies(LIBRARY, ON_A_PAGE)
def test_after_several_optimizer_steps_the_weights_are_the_same():
    expected = train(plain)
    for form in FORMS.values():
        equal(train(form), expected)
    without = train(partial(checkpoint, preserve_rng_state=False))
    assert not torch.equal(without[0], expected[0])  # other masks in backward


# ------------------------------------------------------------- random numbers, autocast


@pytest.mark.verifies("xtrain.pipeline_parallel.surroundings:Surroundings")
@pytest.mark.parametrize("form", FORMS)
def test_backward_leaves_the_random_state_as_it_was(form):
    net, x = network(dropout=0.5), numbers(3, 4)
    loss = FORMS[form](net, x).sum()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def masks_and_random_state_on_a_gpu():
    def run(recompute, autocast):
        net, x = network(dropout=0.5), numbers(3, 4).requires_grad_()
        torch.manual_seed(1)
        with torch.autocast(device_type(), torch.bfloat16, enabled=autocast):
            y = recompute(net.float(), x.float())
        state = torch.get_device_module(device_type()).get_rng_state()
        torch.rand(4)
        y.float().square().sum().backward()
        return [y, state, torch.rand(4), *gradients(*net.parameters())]

    for autocast in (False, True):
        equal(run(checkpoint, autocast), run(plain, autocast))


@pytest.mark.verifies("xtrain.pipeline_parallel.surroundings:Surroundings")
def test_on_a_gpu_masks_and_the_random_state_are_restored(world, xtrain_worlds):
    if xtrain_worlds.device == "cpu":
        pytest.skip("for a device with a random state of its own")
    world(1).run(masks_and_random_state_on_a_gpu)


@pytest.mark.verifies("xtrain.pipeline_parallel.surroundings:Surroundings")
@pytest.mark.parametrize("forward", [True, False])
def test_the_second_run_has_the_autocast_of_the_first(forward):
    def run(recompute, in_backward):
        net, x = network().float(), numbers(3, 4).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = recompute(net, x).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=in_backward):
            loss.backward()
        return [loss, *gradients(x, *net.parameters())]

    equal(run(checkpoint, not forward), run(plain, not forward))


class SquaredSine(TorchFunctionMode):
    """A mode in which operations save other tensors, as in split_backward's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * made if func is torch.sin else made


@pytest.mark.verifies("xtrain.pipeline_parallel.surroundings:Surroundings")
@pytest.mark.parametrize("still_active", [True, False])
def test_modes_of_the_forward_are_active_in_the_second_run_once(still_active):
    def run(recompute):
        x, mode = numbers(3).requires_grad_(), SquaredSine()
        with mode:
            loss = recompute(lambda a: torch.sin(a * 2) * torch.arange(3), x).sum()
        seen = _get_current_function_mode_stack()
        with mode if still_active else nullcontext():
            if still_active:  # torch's own call pauses the mode that sees it
                ones, options = torch.ones_like(loss), (False, False, ())
                _engine_run_backward((loss,), (ones,), *options, accumulate_grad=True)
            else:
                loss.backward()
        assert _get_current_function_mode_stack() == seen
        return [loss, x.grad]

    equal(run(checkpoint), run(plain))


@pytest.mark.verifies("xtrain.pipeline_parallel.surroundings:Surroundings")
def test_new_tensors_are_on_the_device_that_forward_chose():
    def filled(x):
        return x * torch.ones(3, 4, dtype=torch.float64)

    x = torch.empty(3, 4, dtype=torch.float64, device="meta", requires_grad=True)
    with torch.device("meta"):
        y = checkpoint(filled, x)
    y.sum().backward()
    assert x.grad.is_meta and torch.get_default_device().type == "cpu"


# ------------------------------------------------------------------------- what is kept


def chain(layers, x, recompute):
    for layer in layers:
        x = recompute(layer, x)
    return x


@pytest.mark.verifies(LIBRARY, *PIECES, ON_A_PAGE)
@pytest.mark.parametrize("form", FORMS)
def test_forward_keeps_the_inputs_and_nothing_else(form):
    layers = [network() for _ in range(5)]
    weights = [p for layer in layers for p in layer.parameters()]
    x = numbers(3, 4).requires_grad_()
    item = x.element_size()
    with SavedTensors() as kept:
        y = chain(layers, x, plain)
    each = 3 * (4 + 9 + 9) * item  # inputs of both layers and of GELU
    assert kept.nbytes(weights) == 5 * each, y
    with SavedTensors() as kept:
        y = chain(layers, x, FORMS[form])
    assert kept.nbytes(weights) == 5 * 3 * 4 * item, y


@pytest.mark.verifies(LIBRARY)
@pytest.mark.parametrize("form", FORMS)
def test_one_around_others_keeps_its_own_input_only(form):
    recompute = FORMS[form]
    layers = [network() for _ in range(5)]
    weights = [p for layer in layers for p in layer.parameters()]
    x = numbers(3, 4).requires_grad_()
    with SavedTensors() as kept:
        y = recompute(partial(chain, layers, recompute=recompute), x)
    assert kept.nbytes(weights) == x.nbytes, y


@pytest.mark.verifies(LIBRARY)
def test_inputs_of_inner_calls_are_gone_after_the_forward_of_the_outer_one():
    seen = []

    def inner(a):
        seen.append(weakref.ref(a.untyped_storage()))
        return a.sin()

    def outer(a):
        return checkpoint(inner, checkpoint(inner, a.exp()).cos())

    x = numbers(3, 4).requires_grad_()
    y = checkpoint(outer, x)
    assert len(seen) == 2 and not any(ref() for ref in seen)
    y.sum().backward()


@pytest.mark.verifies(LIBRARY)
@pytest.mark.parametrize("form", FORMS)
def test_without_gradients_the_function_runs_once_and_nothing_is_kept(form):
    calls = []

    def function(a):
        calls.append(torch.is_grad_enabled())
        return a.sin()

    x = numbers(3, 4).requires_grad_()
    with torch.no_grad(), SavedTensors() as kept:
        y = FORMS[form](function, x)
    assert calls == [False] and not y.requires_grad and kept.nbytes() == 0
    assert y.grad_fn is None


class Spy:
    """Remembers the storages that runs of a function have made."""

    def __init__(self):
        self.runs = []

    def __call__(self, x):
        self.runs.append([])
        for _ in range(4):
            x = x.sin() * 1.5
            self.runs[-1].append(weakref.ref(x.untyped_storage()))
        unused = x.exp()
        self.runs[-1].append(weakref.ref(unused.untyped_storage()))
        return x * 1.0

    def alive(self, run):
        return sum(ref() is not None for ref in self.runs[run])


@pytest.mark.verifies(*PIECES)
def test_the_second_run_happens_once_and_only_when_backward_needs_it():
    spy, x, after = Spy(), numbers(3, 4).requires_grad_(), []
    h = x.exp()
    h.register_hook(lambda _: after.append(spy.alive(1)))
    y = checkpoint(spy, h)
    z = y.cos()
    y.register_hook(lambda _: after.append(len(spy.runs)))
    z.sum().backward()
    assert after == [1, 0]  # no second run before; and nothing of it is left
    assert len(spy.runs) == 2


@pytest.mark.verifies(*PIECES)
def test_what_was_used_is_freed_also_when_the_graph_is_retained():
    spy, x = Spy(), numbers(3, 4).requires_grad_()
    y = checkpoint(spy, x * 1)
    y.sum().backward(retain_graph=True)
    assert len(spy.runs) == 2 and spy.alive(1) == 0
    y.sum().backward(retain_graph=True)
    assert len(spy.runs) == 3 and spy.alive(2) == 0


@pytest.mark.verifies(*PIECES)
def test_nothing_refers_to_itself_so_all_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            spy, x = Spy(), numbers(3, 4).requires_grad_()
            alive = weakref.ref(spy)
            y = checkpoint(spy, x * 1)
            if backward:
                y.sum().backward()
            del spy
            assert backward == (alive() is None)
            del y
            assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------- errors


class Fickle:
    """A function that is another one in each run."""

    def __init__(self, *runs):
        self.runs = list(runs)

    def __call__(self, x):
        return self.runs.pop(0)(x)


DIFFERENT = {
    "shape saved": (
        lambda x: x.sin().sum(),
        lambda x: x[:2].sin().sum(),
        r"saves as tensor 0 float64\[2, 4\] on cpu, but in forward float64\[3, 4\]",
    ),
    "dtype saved": (
        lambda x: x.sin().sum(),
        lambda x: x.float().sin().sum().double(),
        r"saves as tensor 0 float32\[3, 4\]",
    ),
    "fewer saved": (lambda x: x.sin().sin(), lambda x: x.sin(), "1 tensors"),
    "more saved": (lambda x: x.sin(), lambda x: x.sin().sin(), "2 tensors"),
    "shape": (lambda x: x.sin(), lambda x: x.sin()[:2], r"returns float64\[2, 4\]"),
    "dtype": (lambda x: x.sin(), lambda x: x.sin().float(), "returns float32"),
    "tuple": (lambda x: x.sin(), lambda x: (x.sin(),), r"returns \("),
    "list": (lambda x: (x.sin(),), lambda x: [x.sin()], r"returns \["),
    "key": (lambda x: {"a": x.sin()}, lambda x: {"b": x.sin()}, "returns {'b'"),
    "no tensor": (lambda x: (x.sin(), 1), lambda x: (x.sin(), None), "NoneType"),
}


@pytest.mark.verifies(LIBRARY, *PIECES)
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_second_run_that_differs_is_an_error_that_says_how(name):
    first, second, words = DIFFERENT[name]
    x = numbers(3, 4).requires_grad_()
    y = checkpoint(Fickle(first, second), x * 1)
    y = y["a"] if isinstance(y, dict) else y
    y = y[0] if isinstance(y, (tuple, list)) else y
    with pytest.raises(RuntimeError, match=f"{words}.*must compute the same"):
        y.sum().backward()


@pytest.mark.verifies(LIBRARY)
def test_an_input_that_was_changed_in_place_is_an_error():
    x = numbers(3, 4).requires_grad_()
    h = x * 1
    y = checkpoint(torch.sin, h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    h = x * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint(lambda a: a.add_(1).sin(), h).sum().backward()


@pytest.mark.verifies("xtrain.pipeline_parallel.recompute:_recomputed")
def test_a_saved_tensor_that_the_function_changes_is_an_error():
    x = numbers(3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"float64\[3, 4\].* was changed in place"):
        checkpoint(lambda a: a.exp().mul_(2), x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (x.exp().mul_(2)).sum().backward()


@pytest.mark.verifies(LIBRARY)
def test_an_error_of_the_function_comes_out_in_either_run():
    def broken(a):
        raise KeyError("mine")

    x = numbers(3, 4).requires_grad_()
    with pytest.raises(KeyError, match="mine"):
        checkpoint(broken, x)
    y = checkpoint(Fickle(torch.sin, broken), x)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------ what stays for the caller


@pytest.mark.verifies(LIBRARY)
def test_weights_that_changed_since_forward_go_unnoticed():
    def slope(recompute):
        x, w = numbers(3).requires_grad_(), numbers(3, seed=1).requires_grad_()
        y = recompute(lambda a: (a * w).exp(), x)
        with torch.no_grad():
            w.mul_(2)
        y.sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slope(plain)
    for form in FORMS.values():
        assert slope(form).isfinite().all()  # and of no network that there ever was


@pytest.mark.verifies(LIBRARY)
def test_a_batch_norm_counts_both_runs():
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    y = checkpoint(norm, numbers(3, 4).requires_grad_())
    assert norm.num_batches_tracked == 1
    y.sum().backward()
    assert norm.num_batches_tracked == 2


# ----------------------------------------------------------------------------- the page


def page_without(old, new):
    """The whiteboard form with a line of it changed."""
    text = forms()["checkpoint"].read_text()
    assert text.count(old) == 1, old
    names = {}
    exec(compile(text.replace(old, new), "a page", "exec"), names)
    return names["checkpoint"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.verifies(ON_A_PAGE)
def test_each_line_of_the_page_is_needed():
    attached = page_without("x.detach().requires_grad_(x.requires_grad)", "x")
    x = numbers(3, 4).requires_grad_()
    y = attached(torch.sin, x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.cos().detach())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        attached(torch.sin, x * x).sum().backward()

    redraws = page_without("torch.set_rng_state(ctx.random_state)", "pass")
    found, expected = dropout(redraws), dropout(plain)
    assert torch.equal(found[0], expected[0])
    assert not torch.allclose(found[-1], expected[-1])

    rewinds = page_without("torch.random.fork_rng(devices=[]), ", "")
    found = dropout(rewinds)
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[2], expected[2])  # drawn after backward

    unanchored = page_without("requires_grad=True)", "requires_grad=False)")
    table, ids = nn.Embedding(5, 4), torch.tensor([1, 4])
    assert not unanchored(table, ids).requires_grad


# -------------------------------------------------------------------------------- hooks


@pytest.mark.verifies(LIBRARY)
@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_a_shared_parameter_fire_once_a_backward(form):
    net, fired = network(), []
    for index, parameter in enumerate(net.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=index: fired.append(i))
    h = FORMS[form](net, numbers(3, 4))
    net(FORMS[form](net, h)).sum().backward()
    # each call of the whiteboard form is a backward of its own, within the outer one
    times = 3 if form == "whiteboard" else 1
    assert sorted(fired) == sorted([0, 1, 2, 3] * times)
