"""Stages for the tests of the split backward, and what a plain backward gives."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import randn
from xtrain.pipeline_parallel import SplitBackward, split_backward

SIZE = 6


def random_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return randn(*shape, generator=generator)


def filled(module: nn.Module) -> nn.Module:
    module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(random_of(50 + number, *parameter.shape) / 3)
    return module


class Blocks(nn.Module):
    """Two residual blocks with norms and biases."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(SIZE, 10) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(10, SIZE, bias=False) for _ in range(2))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


class Products(nn.Module):
    """Every way to multiply with a weight on the right, with and without a bias."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(SIZE, SIZE) for _ in range(6))
        self.bias = nn.Parameter(torch.empty(SIZE))

    def forward(self, x):
        a, b, c, d, e, f = self.weights
        x = torch.matmul(x @ a, b).matmul(c).tanh()
        flat = x.flatten(0, -2)
        flat = torch.mm(flat, d).mm(e).tanh()
        return torch.addmm(self.bias, flat, f).view(x.shape)


class Tied(nn.Module):
    """One weight used twice, once transposed, with a bias that is used twice, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight.t(), self.layer.bias)


class Fused(nn.Module):
    """Slices of one weight, one of them used twice, and a cast of another."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3 * SIZE, SIZE))
        self.out = nn.Parameter(torch.empty(SIZE, SIZE))

    def forward(self, x):
        q, k, v = (F.linear(x, w) for w in self.qkv.chunk(3))
        y = torch.softmax(q @ k.mT, -1) @ v
        y = F.linear(y.float(), self.out.float()).double()
        return F.linear(y, self.qkv[:SIZE].view(SIZE, SIZE))


class Made(nn.Module):
    """Weights that are computed: from parameters, and from the input."""

    def __init__(self):
        super().__init__()
        self.normed = weight_norm(nn.Linear(SIZE, SIZE))
        self.scale = nn.Parameter(torch.empty(SIZE, SIZE))
        self.maker = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        y = F.linear(self.normed(x), self.scale * 2)
        made = self.maker(x.flatten(0, -2)[:SIZE])  # [SIZE, SIZE], an activation
        return F.linear(y, made) + y @ made.t()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))
        self.layers[0].requires_grad_(False)
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


class Unused(nn.Module):
    """A layer without an influence on the output, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.used, self.lost, self.idle = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        self.lost(x)
        return self.used(x)


STAGES = (Blocks, Products, Tied, Fused, Made, Frozen, Unused)


def inputs(count: int, needed: bool, *shape: int) -> list[torch.Tensor]:
    return [random_of(n, *shape, SIZE).requires_grad_(needed) for n in range(count)]


def gradients_of(stage: nn.Module, batches: list[torch.Tensor]) -> dict:
    found = {name: p.grad for name, p in stage.named_parameters()}
    return found | {f"x{n}": x.grad for n, x in enumerate(batches)}


def plain(stage: nn.Module, batches: list[torch.Tensor]) -> dict:
    """All gradients of one backward for each micro-batch, the sums of all."""
    stage.zero_grad()
    for number, x in enumerate(batches):
        x.grad = None
        y = stage(x)
        y.backward(random_of(30 + number, *y.shape).to(y.dtype))
    found = {n: None if g is None else g.clone()
             for n, g in gradients_of(stage, batches).items()}  # fmt: skip
    stage.zero_grad()
    for x in batches:
        x.grad = None
    return found


def split_in_order(
    stage: nn.Module, batches: list[torch.Tensor], order: str, split=split_backward
) -> dict:
    """The same, by an order of F, B, W and BW such as "F0 F1 B0 BW1 W0"."""
    running: dict[int, tuple[SplitBackward, torch.Tensor]] = {}
    for action in order.split():
        kind, number = action.rstrip("0123456789"), int(action[-1])
        if kind == "F":
            with split() as part:
                y = stage(batches[number])
            running[number] = part, y
            continue
        part, y = running[number]
        gradient = random_of(30 + number, *y.shape).to(y.dtype)
        if kind == "B":
            part.backward_input(y, gradient)
        elif kind == "W":
            part.backward_weight()
        else:
            part.backward(y, gradient)
    assert _len_torch_function_stack() == 0
    return gradients_of(stage, batches)


def same(found: dict, expected: dict, exactly: bool = False) -> None:
    assert found.keys() == expected.keys()
    assert any(gradient is not None for gradient in expected.values())
    limits = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-12, "atol": 1e-12}
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
            continue
        torch.testing.assert_close(
            found[name], gradient, **limits, msg=lambda m, name=name: f"{name}: {m}"
        )


class Matmuls(TorchDispatchMode):
    """Counts the matmuls inside."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
            torch.ops.aten.bmm,
        ):
            self.shapes[tuple(result.shape)] += 1
        return result

    @property
    def count(self) -> int:
        return self.shapes.total()
