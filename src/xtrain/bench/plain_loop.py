"""The loop of a small teaching trainer, in plain torch: data, tensor, pipeline ranks.

    tensor      each column layer sums its own dX, each row layer its output; the
                head's logits are gathered, and each rank has the whole loss
    data        gradients in buckets, all-reduced in the last backward
    pipeline    1F1B; a rank sends, and waits for that and for what it receives

The steps are those that picotron takes, written here from torch's own parts: hooks and
`batch_isend_irecv`. One micro-batch after the other; no clipping.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from xtrain.bench.race import Case, Trial
from xtrain.bench.trainer_trials import ADAMW, Workload, checked
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.plan import Layout
from xtrain.tensor_parallel.rope import rope_cos_sin

BUCKET_BYTES = 25 * 2**20


class Copy(torch.autograd.Function):
    """As it is; backward sums over the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.group.size() > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum over the tensor ranks; backward leaves the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        if group.size() > 1:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    """The columns of all tensor ranks; backward takes one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        if group.size() == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()]
        return own.contiguous(), None


class Part(nn.Module):
    """This rank's layers of the decoder, cut over the tensor ranks.

    Weights are those of `XtrainModel(config)`, under its names.
    """

    def __init__(
        self, config: XtrainConfig, sequence: int, group: ProcessGroup, layers: range
    ):
        super().__init__()
        places = torch.arange(sequence)
        angles = rope_cos_sin(places, config.head_dim, config.rope_theta)
        self.angles = [torch.cat([angle, angle], -1) for angle in angles]
        self.config, self.group, self.numbers = config, group, layers
        rank, size = group.rank(), group.size()
        self.first = layers.start == 0
        self.last = layers.stop == config.num_hidden_layers
        rows = "o_proj", "down_proj"
        self.weights = nn.ParameterDict()
        for name, weight in XtrainModel(config).state_dict().items():
            if not self.holds(name):
                continue
            if weight.dim() == 2:
                dim = 1 if any(row in name for row in rows) else 0
                weight = weight.chunk(size, dim)[rank].clone()
            self.weights[name.replace(".", "/")] = nn.Parameter(weight)

    def holds(self, name: str) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.numbers
        return self.first if name.startswith("embed") else self.last

    def weight(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/") + "/weight"]

    def columns(self, x: Tensor, name: str) -> Tensor:
        return F.linear(Copy.apply(x, self.group), self.weight(name))

    def rows(self, x: Tensor, name: str) -> Tensor:
        total: Tensor = Sum.apply(F.linear(x, self.weight(name)), self.group)
        return total

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight(name) * (x * torch.rsqrt(mean + self.config.rms_norm_eps))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations in, activations or whole logits out."""
        if self.first:
            x = self.embed(x)
        for number in self.numbers:
            here = f"layers.{number}"
            x = x + self.attention(self.norm(x, f"{here}.input_layernorm"), here)
            x = x + self.mlp(self.norm(x, f"{here}.post_attention_layernorm"), here)
        if not self.last:
            return x
        logits: Tensor = Gather.apply(
            self.columns(self.norm(x, "norm"), "lm_head"), self.group
        )
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        table = self.weight("embed_tokens")
        ids = ids - self.group.rank() * len(table)
        outside = (ids < 0) | (ids >= len(table))
        found = F.embedding(ids.masked_fill(outside, 0), table)
        total: Tensor = Sum.apply(
            found.masked_fill(outside.unsqueeze(-1), 0.0), self.group
        )
        return total

    def attention(self, x: Tensor, here: str) -> Tensor:
        size = self.config.head_dim
        q, k, v = (
            self.columns(x, f"{here}.self_attn.{name}_proj")
            .unflatten(-1, (-1, size))
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = self.angles
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        repeats = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.rows(out.transpose(1, 2).flatten(2), f"{here}.self_attn.o_proj")

    def mlp(self, x: Tensor, here: str) -> Tensor:
        gate = self.columns(x, f"{here}.mlp.gate_proj")
        up = self.columns(x, f"{here}.mlp.up_proj")
        return self.rows(F.silu(gate) * up, f"{here}.mlp.down_proj")


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Buckets:
    """Main gradients; a bucket is all-reduced when the last of them is there."""

    def __init__(self, model: nn.Module, group: ProcessGroup):
        self.group = group
        self.works: list[Any] = []
        self.active = True
        self.main: dict[nn.Parameter, Tensor] = {}
        self.members: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(list(model.parameters())):
            if 4 * sum(p.numel() for p in self.members[-1]) > BUCKET_BYTES:
                self.members.append([])
            self.members[-1].append(parameter)
        self.flat = [torch.zeros(sum(p.numel() for p in m)) for m in self.members]
        self.left = [len(members) for members in self.members]
        for number, members in enumerate(self.members):
            parts = self.flat[number].split([p.numel() for p in members])
            for parameter, part in zip(members, parts, strict=True):
                self.main[parameter] = part.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(
                    partial(self.ready, number)
                )

    def ready(self, number: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.main[parameter] += parameter.grad
        parameter.grad = None
        if not self.active or self.group.size() == 1:
            return
        self.left[number] -= 1
        if self.left[number] == 0:
            self.left[number] = len(self.members[number])
            self.flat[number] /= self.group.size()
            self.works.append(
                dist.all_reduce(self.flat[number], group=self.group, async_op=True)
            )

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        for parameter, main in self.main.items():
            parameter.grad = main

    def zero(self) -> None:
        for flat in self.flat:
            flat.zero_()
        for parameter in self.main:
            parameter.grad = None


@dataclass
class Neighbours:
    """The pipeline ranks before and after this one, and what passes between them."""

    group: ProcessGroup
    shape: tuple[int, ...]

    def exchange(self, *sends: tuple[Tensor | None, int], receive: int) -> Tensor:
        """Send to neighbours, receive from one; wait for both."""
        place, size = self.group.rank(), self.group.size()
        ops, into = [], torch.empty(self.shape, requires_grad=True)
        for tensor, step in sends:
            if tensor is not None and 0 <= place + step < size:
                peer = dist.get_global_rank(self.group, place + step)
                ops.append(dist.P2POp(dist.isend, tensor, peer, self.group))
        if receive and 0 <= place + receive < size:
            peer = dist.get_global_rank(self.group, place + receive)
            ops.append(dist.P2POp(dist.irecv, into.data, peer, self.group))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return into


def one_f_one_b(
    part: Part,
    near: Neighbours,
    buckets: Buckets,
    batches: list[Tensor],
    loss_of: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Forward and backward of all micro-batches; the summed loss on the last rank."""
    place, size = near.group.rank(), near.group.size()
    count, warm_up = len(batches), min(size - 1 - place, len(batches))
    inputs, outputs, total = [], [], torch.zeros(())

    def forward(number: int, received: Tensor | None) -> Tensor:
        x = batches[number] if part.first or received is None else received
        y = part(x)
        if part.last:
            y = loss_of(y, number)
            total.add_(y.detach())
        inputs.append(x)
        outputs.append(y)
        return y

    def backward(number: int, grad: Tensor | None) -> Tensor | None:
        buckets.active = number == count - 1
        x, y = inputs.pop(0), outputs.pop(0)
        torch.autograd.backward(y, None if part.last else grad)
        return None if part.first else x.grad

    for number in range(warm_up):
        y = forward(number, near.exchange(receive=-1))
        near.exchange((y.detach(), 1), receive=0)
    received = near.exchange(receive=-1) if warm_up < count else None
    for number in range(count - warm_up):
        y = forward(warm_up + number, received)
        grad = near.exchange((None if part.last else y.detach(), 1), receive=1)
        dx = backward(number, grad)
        more = number < count - warm_up - 1
        received = near.exchange((dx, -1), receive=-1 if more else 0)
    for number in range(count - warm_up, count):
        grad = near.exchange(receive=1)
        near.exchange((backward(number, grad), -1), receive=0)
    return total


def plain_loop(work: Workload, layout: Layout, case: Case) -> Trial:
    """A step of the loop on the layout's data, tensor and pipeline ranks."""
    config = work.config
    sizes = layout.pipeline, layout.data, layout.tensor
    names = "pipeline", "data", "tensor"
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    pipeline, data, tensor = groups
    each = -(-work.layers // layout.pipeline)
    begin = pipeline.rank() * each
    layers = range(begin, min(begin + each, work.layers))
    part = Part(config, work.sequence, tensor, layers)
    buckets = Buckets(part, data)
    optimizer = torch.optim.AdamW(part.parameters(), **ADAMW)
    tokens, labels = work.own_batch(layout)
    count = layout.micro_batches
    batches, targets = tokens.chunk(count), labels.chunk(count)
    rows = work.batch // count
    near = Neighbours(pipeline, (rows, work.sequence, config.hidden_size))

    def loss_of(logits: Tensor, number: int) -> Tensor:
        flat = logits.flatten(0, 1), targets[number].flatten()
        return F.cross_entropy(*flat) / count

    def step() -> Tensor:
        buckets.zero()
        loss = one_f_one_b(part, near, buckets, list(batches), loss_of)
        buckets.wait()
        optimizer.step()
        loss /= layout.data
        for group in (data, pipeline):
            dist.all_reduce(loss, group=group)
        return loss

    return checked(step)
