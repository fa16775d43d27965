"""Of cut layers: outputs, gradients and slices are those of the whole layer."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, say, sends

SIZES = {"rotary_embedding": (1, 2, 4, 8), "tensor_parallel_attention": (1, 2, 4, 8)}
"""World sizes of checks that are not for any."""


def check_column_parallel_linear(form: Any, rank: int, size: int) -> None:
    """Features and all gradients are slices of those of the whole layer."""
    for bias, shape in ((True, (3, 5)), (False, (7,)), (True, (1, 4))):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = nn.Linear(6, 24, bias)
        layer = form(full)
        x, grad = (randn(*shape, n, seed=n) for n in (6, 24))
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = full(whole)
            y.backward(grad)
            with Sent() as ahead:
                out = layer(mine)
            with Sent() as back:
                out.backward(grad.chunk(size, -1)[rank])
        same(f"its part of the features, bias={bias}", out, y.chunk(size, -1)[rank])
        for name, parameter in layer.named_parameters():
            part = gradient(full.get_parameter(name)).chunk(size)[rank]
            same(f"its part of the gradient of {name}", gradient(parameter), part)
        same("all of dX", gradient(mine), gradient(whole))
        sends(ahead, "nothing forward", 0)
        sends(back, "backward 2(N-1)/N of x", 2 * (size - 1) / size * x.nbytes)


def check_ring_all_gather_matmul(form: Any, rank: int, size: int) -> None:
    """Two layers that read x: their features are those of the gathered sequence."""
    weights = [randn(24, 6, seed=s) for s in (2, 3)]
    rows = [weight.chunk(size)[rank] for weight in weights]
    for shape, dim in (((24,), 0), ((2, 24), 1), ((24, 3), 0)):
        x = randn(*shape, 6, seed=1)
        with Sent() as sent:
            found = form(x.chunk(size, dim)[rank], rows, dim)
        for number, (y, weight) in enumerate(zip(found, weights, strict=True)):
            part = (x @ weight.mT).chunk(size, -1)[rank]
            same(f"its features of layer {number}, tokens in dim {dim}", y, part)
        sends(sent, "(N-1)/N of the whole x", (size - 1) / size * x.nbytes)


def check_ring_matmul_reduce_scatter(form: Any, rank: int, size: int) -> None:
    """A row layer's output, summed: each rank keeps its slice of the tokens."""
    weight = randn(6, 24, seed=2)
    columns = weight.chunk(size, 1)[rank]
    for shape, dim in (((24,), 0), ((2, 24), 1), ((24, 3), 0)):
        x = randn(*shape, 24, seed=1)
        with Sent() as sent:
            y = form(x.chunk(size, -1)[rank], columns, dim)
        whole = x @ weight.mT
        same(f"its tokens in dim {dim}", y, whole.chunk(size, dim)[rank])
        sends(sent, "(N-1)/N of the whole y", (size - 1) / size * whole.nbytes)


def check_rotary_embedding(form: Any, rank: int, size: int) -> None:
    """Pairs turn as complex numbers do, and a score depends on the distance alone."""
    q, k = (randn(2, 8, 5, 4, seed=n) for n in (1, 2))
    positions = 7.0 * torch.arange(5)
    with Sent() as sent:
        mine = form(q.chunk(size, 1)[rank], positions)
    for pair, frequency in enumerate((1.0, 0.01)):  # 10,000 ** (-2 j / 4)
        number = torch.complex(q[..., pair], q[..., pair + 2])
        turned = torch.polar(torch.ones_like(positions), positions * frequency) * number
        expected = torch.stack([turned.real, turned.imag], -1).chunk(size, 1)[rank]
        actual = mine[..., [pair, pair + 2]]
        same(f"pair {pair} of this rank's heads", actual, expected)
    near, far = (
        form(q, positions + shift) @ form(k, positions + shift).mT
        for shift in (0, 1000)
    )
    same("the scores after a shift of both by 1,000", far, near, 1e-10)
    sends(sent, "nothing", 0)


def check_row_parallel_linear(form: Any, rank: int, size: int) -> None:
    """The output is the whole layer's, the gradients are slices of its gradients."""
    for bias, shape in ((True, (3, 5)), (False, (7,)), (True, (1, 4))):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = nn.Linear(24, 6, bias)
        layer = form(full)
        x, grad = (randn(*shape, n, seed=n) for n in (24, 6))
        whole = x.clone().requires_grad_()
        mine = x.chunk(size, -1)[rank].clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = full(whole)
            y.backward(grad)
            with Sent() as ahead:
                out = layer(mine)
            with Sent() as back:
                out.backward(grad)
        same(f"all features, bias={bias} added once", out, y)
        part = gradient(full.weight).chunk(size, 1)[rank]
        same("its part of dW", gradient(layer.weight), part)
        if bias:
            same("all of db", gradient(layer.bias), gradient(full.bias))
        same("its part of dX", gradient(mine), gradient(whole).chunk(size, -1)[rank])
        sends(ahead, "forward 2(N-1)/N of y", 2 * (size - 1) / size * y.nbytes)
        sends(back, "nothing backward", 0)


def check_sequence_parallel_region(form: Any, rank: int, size: int) -> None:
    """Norm and MLP on a part of the sequence equal those of one process."""
    torch.manual_seed(0)  # the same whole model on every rank
    norm, up, down = (nn.RMSNorm(6), nn.Linear(6, 24, False), nn.Linear(24, 6, False))
    full = nn.Sequential(norm, up, nn.Tanh(), down)
    each = 24 // size
    mine_up, mine_down = (nn.Linear(*n, False) for n in ((6, each), (each, 6)))
    with torch.no_grad():
        norm.weight.copy_(randn(6, seed=5))
        mine_up.weight.copy_(up.weight.chunk(size, 0)[rank])
        mine_down.weight.copy_(down.weight.chunk(size, 1)[rank])
    block = nn.Sequential(mine_up, nn.Tanh(), mine_down)
    mine_norm = copy.deepcopy(norm)
    region = form(mine_norm, block)

    x, grad = (randn(3, 24, 6, seed=n) for n in (1, 2))
    whole = x.clone().requires_grad_()
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    for _ in range(2):  # gradients add up
        y = whole + full(whole)
        y.backward(grad)
        with Sent() as ahead:
            out = region(mine)
        with Sent() as back:
            out.backward(grad.chunk(size, 1)[rank])
    same("its part of the sequence", out, y.chunk(size, 1)[rank])
    same("its part of dX", gradient(mine), gradient(whole).chunk(size, 1)[rank])
    same("all of the norm's dW", gradient(mine_norm.weight), gradient(norm.weight))
    part = gradient(up.weight).chunk(size, 0)[rank]
    same("its part of the first dW", gradient(mine_up.weight), part)
    part = gradient(down.weight).chunk(size, 1)[rank]
    same("its part of the second dW", gradient(mine_down.weight), part)
    ring, nbytes = 2 * (size - 1) / size, x.nbytes + norm.weight.nbytes
    sends(ahead, "2(N-1)/N of the whole x forward", ring * x.nbytes)
    sends(back, "backward too, and of the norm's weights", ring * nbytes)


HEADS, HEAD_DIM, HIDDEN = 8, 4, 6


class PlainAttention(nn.Module):
    def __init__(self, key_heads: int):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, key_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def check_tensor_parallel_attention(form: Any, rank: int, size: int) -> None:
    """Eight query heads with 8 key heads, and with 2, which several ranks may share."""
    x, grad = (randn(3, 5, HIDDEN, seed=n) for n in (1, 2))
    for key_heads in (8, 2):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = PlainAttention(key_heads)
        layer = form(full, head_dim=HEAD_DIM)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = full(whole)
        y.backward(grad)
        with Sent() as ahead:
            out = layer(mine)
        with Sent() as back:
            out.backward(grad)
        say(f"{HEADS} query heads, {key_heads} key heads:")
        same("the output", out, y)
        same("dX", gradient(mine), gradient(whole))
        for name, parameter in layer.named_parameters():
            dim, expected = int(name == "o_proj"), gradient(getattr(full, name).weight)
            if name in ("k_proj", "v_proj"):
                heads = expected.unflatten(0, (-1, HEAD_DIM))
                expected = heads.repeat_interleave(
                    max(1, size // key_heads), 0
                ).flatten(0, 1)
            part = expected.chunk(size, dim)[rank]
            same(f"this rank's gradient of {name}", gradient(parameter), part)
        ring, shared = 2 * (size - 1) / size, (full.k_proj, full.v_proj)
        sends(ahead, "2(N-1)/N of y forward", ring * y.nbytes)
        nbytes = sum(p.weight.nbytes for p in shared) * (size > key_heads) + x.nbytes
        words = "of x backward, and of dW_k and dW_v if K < N"
        sends(back, words, ring * nbytes)


class PlainSwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check_tensor_parallel_mlp(form: Any, rank: int, size: int) -> None:
    """Five AdamW steps on its part of the inner size equal five of one process."""
    torch.manual_seed(0)  # the same whole block on every rank
    full = PlainSwiGLU(6, 24)
    mlp = form(full)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (full, mlp)]
    for step in range(5):
        x = randn(3, 5, 6, seed=step)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = full(whole)
        y.square().sum().backward()
        with Sent() as ahead:
            out = mlp(mine)
        with Sent() as back:
            out.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    same("the output of step 5", out, y)
    same("its dX", gradient(mine), gradient(whole))
    for name, dim in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
        part = getattr(full, name).weight.chunk(size, dim)[rank]
        same(f"its part of {name} after 5 steps", getattr(mlp, name), part)
    nbytes = 2 * (size - 1) / size * y.nbytes
    sends(ahead, "forward 2(N-1)/N of y", nbytes)
    sends(back, "backward 2(N-1)/N of x", nbytes)


def check_vocab_parallel_cross_entropy(form: Any, rank: int, size: int) -> None:
    """The loss is torch's, the gradient its part of the columns of torch's."""
    logits = randn(2, 5, 24, seed=1) * 500  # e^500 overflows
    labels = torch.tensor([[0, 2, 3, -100, 5], [6, 8, 9, 11, -100]])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    expected.backward()
    mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
    with Sent() as ahead:
        loss = form(mine, labels)
    with Sent() as back:
        loss.backward()
    same("the loss of 8 tokens; 2 are ignored", loss, expected)
    part = gradient(whole).chunk(size, -1)[rank]
    same("its part of the gradient's columns", gradient(mine), part)
    nbytes = 2 * (size - 1) / size * 3 * labels.numel() * logits.itemsize
    sends(ahead, "forward 2(N-1)/N of three numbers a token", nbytes)
    sends(back, "nothing backward", 0)


def check_vocab_parallel_embedding(form: Any, rank: int, size: int) -> None:
    """The output has the whole table's bits, the gradient is a part of its gradient."""
    torch.manual_seed(0)  # the same whole table on every rank
    each = 24 // size
    full = nn.Embedding(24, 6)
    layer = form(full)
    edges = [row for r in range(size) for row in (each * r, each * r + each - 1)]
    ids = torch.tensor([edges, edges[::-1]])  # the first and last row of each rank
    grad = randn(2, 2 * size, 6, seed=1)
    y = full(ids)
    y.backward(grad)
    with Sent() as ahead:
        out = layer(ids)
    with Sent() as back:
        out.backward(grad)
    same("the rows of all ids", out, y, 0)
    part = gradient(full.weight).chunk(size)[rank]
    same("the gradient of its part of the table", gradient(layer.weight), part)
    sends(ahead, "forward 2(N-1)/N of y", 2 * (size - 1) / size * y.nbytes)
    sends(back, "nothing backward", 0)
