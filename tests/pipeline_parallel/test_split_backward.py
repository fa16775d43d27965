"""Backward in two parts, in one process: the gradients of a plain one, each once."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from tests.pipeline_parallel.split_stages import (
    SIZE,
    STAGES,
    Blocks,
    Fused,
    Made,
    Matmuls,
    Products,
    Tied,
    Unused,
    filled,
    gradients_of,
    inputs,
    plain,
    random_of,
    same,
    split_in_order,
)
from xtrain.comm.deferred import suspended
from xtrain.pipeline_parallel import checkpoint as our_checkpoint
from xtrain.pipeline_parallel import split_backward
from xtrain.whiteboard.pipeline_parallel.split_backward import (
    split_backward as on_a_page,
)

SPLIT = "xtrain.pipeline_parallel.split_backward"
DEFERRED = "xtrain.comm.deferred"
PARTS = (
    f"{SPLIT}:split_backward",
    f"{SPLIT}:SplitBackward",
    f"{SPLIT}:_Linear",
    f"{DEFERRED}:DeferredGradients",
    f"{DEFERRED}:_WeightGradients",
)
ON_A_PAGE = "xtrain.whiteboard.pipeline_parallel.split_backward:split_backward"
ORDERS = (
    "F0 B0 W0 F1 B1 W1 F2 B2 W2",
    "F0 F1 B0 B1 W1 W0 F2 B2 W2",
    "F0 F1 F2 BW0 B1 B2 W2 W1",
    "F0 F1 F2 B2 B0 W2 B1 W0 W1",
)


FORMS = pytest.mark.parametrize(
    "form",
    [
        pytest.param(split_backward, marks=pytest.mark.verifies(*PARTS), id="library"),
        pytest.param(on_a_page, marks=pytest.mark.verifies(ON_A_PAGE), id="whiteboard"),
    ],
)


def forward_of(stage, x):
    with split_backward() as split:
        y = stage(x)
    return split, y


def after_b(stage, x):
    """The inputs have their gradients, those of the weights wait."""
    split, y = forward_of(stage, x)
    split.backward_input(y, torch.ones_like(y))
    return split


@FORMS
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("needed", [True, False], ids=["middle", "first"])
def test_in_any_order_all_gradients_are_those_of_plain_backwards(kind, needed, form):
    stage = filled(kind())
    orders = [o for o in ORDERS if form is split_backward or "BW" not in o]
    for shape in ((4,), (2, 5), (3, 1, 2)):
        batches = inputs(3, needed, *shape)
        expected = plain(stage, batches)
        for order in orders:
            same(split_in_order(stage, batches, order, form), expected)
            stage.zero_grad()
            for x in batches:
                x.grad = None


def test_the_order_of_sums_is_torchs_to_the_last_bit():
    stage, batches = filled(Blocks()), inputs(2, True, 2, 5)
    expected = plain(stage, batches)
    found = split_in_order(stage, batches, "F0 F1 B0 B1 W0 W1")
    same(found, expected, exactly=True)


@pytest.mark.verifies(f"{SPLIT}:of_matmul", f"{SPLIT}:of_addmm", f"{SPLIT}:of_linear")
@pytest.mark.parametrize(
    ("kind", "forward", "by_input", "by_weight", "form"),
    [(Blocks, 4, 4, 4, split_backward), (Products, 6, 6, 6, split_backward),
     (Tied, 2, 2, 2, split_backward), (Fused, 7, 9, 5, split_backward),
     (Unused, 2, 1, 1, split_backward), (Blocks, 4, 4, 4, on_a_page)],
)  # fmt: skip
def test_every_matmul_runs_once_and_those_of_weights_run_in_w(
    kind, forward, by_input, by_weight, form
):
    """The trap of splitting by hand: B computes dW as well, and throws it away."""
    stage, (x,) = filled(kind()), inputs(1, True, 2, 5)
    with Matmuls() as in_forward, form() as split:
        y = stage(x)
    with Matmuls() as in_input:
        split.backward_input(y, torch.ones_like(y))
    with Matmuls() as in_weight:
        split.backward_weight()
    counted = in_forward.count, in_input.count, in_weight.count
    assert counted == (forward, by_input, by_weight)
    y = stage(x)
    with Matmuls() as together:
        y.backward(torch.ones_like(y))
    assert together.count == by_input + by_weight


class Both(torch.autograd.Function):
    """A linear layer as fused kernels are written: one backward, both gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return (
            dy @ weight if ctx.needs_input_grad[0] else None,
            dy.t() @ x if ctx.needs_input_grad[1] else None,
        )


class AtOnce(nn.Linear):
    def forward(self, x):
        return Both.apply(x, self.weight)


OF_FUNCTIONS = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 cannot walk over a Function"
)


@pytest.mark.parametrize(
    ("kind", "times"),
    [(nn.Linear, 1), pytest.param(AtOnce, 2, marks=OF_FUNCTIONS)],
)
def test_torchs_walk_computes_both_gradients_of_a_function_twice(kind, times):
    stage = filled(nn.Sequential(*(kind(SIZE, SIZE, bias=False) for _ in range(3))))
    (x,) = inputs(1, True, 4)
    expected = plain(stage, [x])
    stage.zero_grad()
    x.grad, y = None, stage(x)
    with Matmuls() as walked:
        dy = random_of(30, *y.shape)
        _, groups = stage_backward_input([y], [dy], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    assert walked.count == times * 2 * len(stage)
    same(gradients_of(stage, [x]), expected)


def test_the_first_stage_computes_no_matmul_in_b():
    stage, (x,) = filled(nn.Sequential(nn.Linear(SIZE, SIZE))), inputs(1, False, 4)
    split, y = forward_of(stage, x)
    with Matmuls() as in_input:
        split.backward_input(y, torch.ones_like(y))
    assert in_input.count == 0
    assert all(p.grad is None for p in stage.parameters())
    with Matmuls() as in_weight:
        split.backward_weight()
    assert in_weight.count == 1


def test_what_is_not_in_a_matmul_has_its_gradient_after_b():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    after_b(stage, x)
    assert x.grad is not None
    early = {n.split(".")[0] for n, p in stage.named_parameters() if p.grad is not None}
    assert early == {"norms"}


@pytest.mark.verifies(f"{DEFERRED}:may_wait")
def test_weights_that_are_computed_have_their_gradients_in_b():
    """Autograd would have to keep what they were computed from, or they are
    activations, whose gradients the stage before waits for."""
    stage, (x,) = filled(Made()), inputs(1, True, 2, 5)
    after_b(stage, x)
    late = {n for n, p in stage.named_parameters() if p.grad is None}
    assert late == {"maker.weight", "maker.bias"}


def test_an_activation_that_is_a_leaf_is_no_weight():
    def products(x, other):
        return F.linear(x, other) + x @ other + F.linear(x, other.t())

    x, other = inputs(2, True, SIZE)
    products(x, other).sum().backward()
    expected = [x.grad, other.grad]
    x, other = inputs(2, True, SIZE)
    with split_backward() as split:
        y = products(x, other)
    split.backward_input(y.sum())
    assert split.kept_bytes == 0
    for found, gradient in zip((x.grad, other.grad), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.verifies(f"{DEFERRED}:without_graph")
@pytest.mark.parametrize(
    ("kind", "form"),
    [(Blocks, split_backward), (Tied, split_backward), (Fused, split_backward),
     (Blocks, on_a_page)],
)  # fmt: skip
def test_hooks_of_a_parameter_run_once_in_w_with_its_whole_gradient(kind, form):
    stage, (x,) = filled(kind()), inputs(1, True, 2, 5)
    expected = plain(stage, [x])
    called: list[tuple[str, str]] = []
    for name, parameter in stage.named_parameters():

        def before(gradient, name=name):
            called.append(("before", name))
            torch.testing.assert_close(gradient, expected[name])
            return 2 * gradient

        def after(parameter, name=name):
            called.append(("after", name))
            torch.testing.assert_close(parameter.grad, 2 * expected[name])

        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)
    with form() as split:
        y = stage(x)
    split.backward_input(y, random_of(30, *y.shape))
    late = {n for n, _ in stage.named_parameters() if not n.startswith("norms")}
    assert not late & {name for _, name in called}
    called.clear()
    split.backward_weight()
    assert sorted(called) == sorted(
        (when, n) for n in late for when in ("before", "after")
    )


def test_a_gradient_is_added_and_its_tensors_are_freed_before_the_next():
    """So W holds one dW at a time, and data parallelism can begin while it runs."""
    layers = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)]
    stage, (x,) = filled(nn.Sequential(*layers)), inputs(1, True, 4)
    alive: list[int] = []
    split = after_b(stage, x)
    kept = [weakref.ref(t) for queued in split.queue for t in queued.tensors]
    del x
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(ref() is not None for ref in kept))
        )
    split.backward_weight()
    assert len(kept) == 6 and alive == [4, 2, 0]
    assert [layer.weight.grad is not None for layer in layers] == [True] * 3


def test_between_b_and_w_inputs_and_gradients_of_layers_are_kept_and_nothing_else():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate = (nn.Linear(SIZE, 8, bias=False) for _ in range(2))
            self.down = nn.Linear(8, SIZE)

        def forward(self, x):
            up, gate = self.up(x), self.gate(x)
            seen.update(up=weakref.ref(up), gate=weakref.ref(gate))
            return self.down(F.silu(gate) * up)

    seen: dict = {}
    stage, (x,) = filled(Stage()), inputs(1, True, 5)
    split, y = forward_of(stage, x)
    assert split.kept_bytes == 0
    split.backward_input(y, torch.ones_like(y))
    out = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert seen["up"]() is None and seen["gate"]() is None and out() is None
    shared_input = SIZE + 8 + 8
    assert split.kept_bytes == 8 * 5 * (shared_input + 8 + SIZE)
    split.backward_weight()
    assert split.kept_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradients_are_those_of_a_plain_backward(dtype):
    stage = filled(Blocks()).float()
    (x,) = (x.detach().float().requires_grad_() for x in inputs(1, True, 2, 5))
    with torch.autocast("cpu", dtype):
        expected = plain(stage, [x])
        with split_backward() as split:
            y = stage(x)
    assert stage.up[0](x).dtype == torch.float32
    split.backward_input(y, random_of(30, *y.shape).to(y.dtype))
    split.backward_weight()
    found = gradients_of(stage, [x])
    assert found["up.0.weight"].dtype == torch.float32
    same(found, expected, exactly=True)


def test_autocast_leaves_float64_alone():
    stage, (x,) = filled(nn.Linear(SIZE, SIZE)), inputs(1, True, 2, 5)
    with torch.autocast("cpu", torch.bfloat16), split_backward() as split:
        y = stage(x)
    assert y.dtype == torch.float64 and torch.equal(y, stage(x))
    split.backward(y, torch.ones_like(y))


def torchs_checkpoint(function, x):
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.verifies(f"{SPLIT}:run_backward")
@pytest.mark.parametrize("recompute", [our_checkpoint, torchs_checkpoint])
@pytest.mark.parametrize("kind", [Blocks, Fused])
def test_a_forward_that_a_checkpoint_repeats_leaves_its_gradients_too(kind, recompute):
    stage, batches = filled(kind()), inputs(2, True, 2, 5)
    expected = plain(stage, batches)

    def recomputed(x):
        return recompute(stage, x)

    stage_of = nn.Module()
    stage_of.forward = recomputed
    split_in_order(stage_of, batches, "F0 F1 B0 B1")
    late = [n for n, p in stage.named_parameters() if p.grad is None]
    assert late == [n for n, _ in stage.named_parameters() if "norm" not in n]
    stage.zero_grad()
    for x in batches:
        x.grad = None
    split_in_order(stage_of, batches, "F0 F1 B0 B1 W1 W0")
    same(gradients_of(stage, batches), expected)


@pytest.mark.verifies(f"{DEFERRED}:suspended")
def test_a_backward_within_a_forward_leaves_nothing_and_the_rest_waits():
    before, within, after = (filled(nn.Linear(SIZE, SIZE)) for _ in range(3))
    x, z = inputs(2, True, 2, 5)
    with split_backward() as split:
        y = before(x)
        with suspended():
            within(z).sum().backward()  # left to wait, it would be refused here
        y = after(y)
    assert within.weight.grad is not None
    split.backward_input(y, torch.ones_like(y))
    assert before.weight.grad is None and after.weight.grad is None
    split.backward_weight()
    assert before.weight.grad is not None and after.weight.grad is not None


def test_several_outputs_and_edges_of_the_graph():
    layers = [filled(nn.Linear(SIZE, SIZE)) for _ in range(2)]
    (x,) = inputs(1, True, 4)
    gradients = [random_of(1, 4, SIZE), random_of(2, 4, SIZE)]
    torch.autograd.backward([layer(x) for layer in layers], gradients)
    parameters = [x, *layers[0].parameters(), *layers[1].parameters()]
    expected = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    with split_backward() as split:
        outputs = [layer(x) for layer in layers]
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in outputs]
    del outputs
    split.backward_input(edges, gradients)
    split.backward_weight()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_different():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    with torch.no_grad(), split_backward():
        y = stage(x)
    assert not y.requires_grad
    assert torch.equal(y, stage(x))


def test_calls_in_the_wrong_order_are_refused():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    split, y = forward_of(stage, x)
    with pytest.raises(RuntimeError, match="comes once, after backward_input"):
        split.backward_weight()
    split.backward_input(y, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="was called before"):
        split.backward_input(y, torch.ones_like(y))
    split.backward_weight()
    for call in (split.backward_weight, lambda: split.backward(y, torch.ones_like(y))):
        with pytest.raises(RuntimeError):
            call()


def test_a_plain_backward_of_such_a_forward_is_refused():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    with split_backward():
        y = stage(x)
    with pytest.raises(RuntimeError, match="backward_input and backward_weight"):
        y.sum().backward()


@pytest.mark.parametrize("what", ["input", "gradient"])
def test_what_waits_must_not_be_written_into(what):
    layer, (x,) = filled(nn.Linear(SIZE, SIZE)), inputs(1, False, 4)
    with split_backward() as split:
        y = layer(x)
    gradient = torch.ones_like(y)
    split.backward_input(y, gradient)
    (x if what == "input" else gradient).zero_()
    with pytest.raises(RuntimeError, match="has been written into"):
        split.backward_weight()
    assert layer.weight.grad is None and split.kept_bytes == 0


def fail(_):
    raise LookupError("a hook failed")


def test_a_failure_leaves_no_mode_and_no_memory_behind():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    with pytest.raises(LookupError), split_backward():
        fail(stage(x))
    assert _len_torch_function_stack() == 0
    split, y = forward_of(stage, x)
    x.register_hook(fail)
    with pytest.raises(LookupError):
        split.backward_input(y, torch.ones_like(y))
    assert _len_torch_function_stack() == 0 and split.kept_bytes == 0
    with pytest.raises(RuntimeError, match="comes once, after backward_input"):
        split.backward_weight()


def test_a_failure_in_w_leaves_no_memory_behind():
    stage, (x,) = filled(Blocks()), inputs(1, True, 4)
    split = after_b(stage, x)
    stage.up[1].weight.register_hook(fail)
    with pytest.raises(LookupError):
        split.backward_weight()
    assert split.kept_bytes == 0
