"""Functions that run on every rank for the tables and figures of lc3."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import Collectives, collectives_named
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
)

LAYERS, WIDTH = 6, 64


class Tower(nn.Module):
    """Layers of the model, each a block of stage 3, and nothing that belongs to none.

    Every layer's size divides by 8, so nothing is padded on up to 8 ranks.
    """

    def __init__(self, layers: int = LAYERS, width: int = WIDTH):
        super().__init__()
        self.layers = XtrainModel(config_of(layers, width)).layers

    def forward(self, x_BSH: Tensor) -> Tensor:
        positions = torch.arange(x_BSH.shape[1])
        for layer in self.layers:
            x_BSH = layer(x_BSH, positions)
        return x_BSH


def config_of(layers: int, width: int) -> XtrainConfig:
    """Four query heads, two key heads, and SwiGLU twice as wide."""
    return XtrainConfig(
        vocab_size=1,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def parameters_of_tower(width: int = WIDTH) -> int:
    """Elements of its parameters."""
    return LAYERS * config_of(LAYERS, width).layer_parameters


class Training:
    """A tower and its optimizer, sharded as a stage says.

    Args:
        stage: "0" is plain data parallelism, "1", "2", "3"; "3 kept" is stage 3 with
            weights that stay between forward and backward.
        bf16: bfloat16 weights with float32 masters (in stage 3: float32 shards and
            bfloat16 gathered weights); otherwise everything is float32.
        cap_kib: size of a bucket of stages 0 to 2.
        collectives: a choice or its name.
        tower: what is trained; a new one unless given.
    """

    def __init__(
        self,
        stage: str,
        collectives: str | Collectives = "torch",
        bf16: bool = False,
        width: int = WIDTH,
        cap_kib: float = 25600,
        tower: Tower | None = None,
    ):
        choice = collectives
        if isinstance(choice, str):
            choice = collectives_named(choice)
        tower = tower or Tower(width=width)
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.sharded: list[Any] = []
        cap = cap_kib / 1024
        if stage.startswith("3"):
            self.model = FullyShardedDataParallel(
                tower,
                compute_dtype=torch.bfloat16 if bf16 else None,
                reshard_after_forward=stage == "3",
                collectives=choice,
            )
            self.optimizer: Any = AdamW(self.model.parameters(), lr=1e-3)
            self.inner = self.optimizer
        elif stage == "0":
            self.model = DistributedDataParallel(
                tower.to(self.dtype), bucket_cap_mb=cap, collectives=choice
            )
            self.optimizer = MixedPrecisionOptimizer(
                self.model.parameters(), AdamW, lr=1e-3
            )
            self.inner = self.optimizer.optimizer
        else:
            self.model = tower.to(self.dtype)
            self.optimizer = ZeroOptimizer(
                self.model.parameters(),
                AdamW,
                stage=int(stage),
                bucket_cap_mb=cap,
                collectives=choice,
                lr=1e-3,
            )
            self.inner = self.optimizer.optimizer
            self.sharded = self.optimizer.buckets
        self.width = width

    def forward(self, tokens: int = 2) -> Tensor:
        """The loss of a batch of ones."""
        x = torch.ones(1, tokens, self.width, dtype=self.dtype)
        loss: Tensor = self.model(x).float().square().mean()
        return loss

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def bytes_held(stage: str, bf16: bool) -> dict[str, int]:
    """Bytes this rank holds when the second step's backward has ended."""
    training = Training(stage, bf16=bf16)
    training.step()
    training.backward()
    parameters = list(training.model.parameters())
    masters = [m for group in training.inner.param_groups for m in group["params"]]
    mine = {id(p) for p in parameters}
    shards = {b.shard.data_ptr() for b in training.sharded}
    copies = [m for m in masters if id(m) not in mine and m.data_ptr() not in shards]
    states = [t for state in training.inner.state.values() for t in state.values()]
    grads = [p.grad for p in (*parameters, *masters) if p.grad is not None]
    grads += [b.full_grad for b in training.sharded if b.full_grad is not None]
    return {
        "weights": nbytes(parameters),
        "gradients": nbytes({id(g): g for g in grads}.values()),
        "optimizer": nbytes(copies) + nbytes(t for t in states if t.dim() > 0),
    }


def nbytes(tensors: Any) -> int:
    """Bytes of the elements of some tensors."""
    return sum(t.nbytes for t in tensors)


def traffic(stage: str, collectives: str, width: int) -> dict[str, Any]:
    """Payload and wire bytes of one float32 training step, connections warm."""
    training = Training(stage, collectives, width=width)
    training.step()
    dist.barrier()
    time.sleep(0.05)  # let the last bytes of the barrier leave
    with CommLedger() as ledger:
        training.step()
        time.sleep(0.05)  # gloo's thread may still be sending for this rank
    calls: dict[str, int] = {}
    for event in ledger.events:
        if event.kind == "collective":
            calls[event.op] = calls.get(event.op, 0) + 1
    return {"sent": ledger.bytes_sent, "wire": ledger.wire_bytes, "calls": calls}


def gradients_alive(stage: str, cap_kib: float) -> list[int]:
    """Bytes of whole gradients after each layer's backward."""
    training = Training(stage, cap_kib=cap_kib)
    seen: list[int] = []
    parameters = list(training.model.parameters())

    def look(_: Tensor) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        grads += [b.full_grad for b in training.sharded if b.full_grad is not None]
        seen.append(nbytes(grads))

    for layer in training.model.layers:  # its first norm is the last in backward
        weight = layer.input_layernorm.weight
        weight.register_post_accumulate_grad_hook(look)
    training.backward()
    return seen


def weights_alive(stage: str) -> list[int]:
    """Bytes of gathered weights at each layer's forward, then at each one's backward.

    The second step: the first forward learns the order that the prefetch follows.
    """
    training = Training(stage)
    seen: list[int] = []

    def look(*_: Any) -> None:
        shards = [s for u in training.model.units for s in u.flat_groups]
        seen.append(sum(s.full.untyped_storage().nbytes() for s in shards))

    for layer in training.model.module.layers:
        inner = layer.forward
        layer.forward = watched(inner, look)
    for _ in range(2):
        seen.clear()
        training.backward()
    return seen


def watched(
    forward: Callable[..., Tensor], look: Callable[..., None]
) -> Callable[..., Tensor]:
    """A layer's forward that looks when it begins, and again in its backward."""

    def call(*inputs: Tensor) -> Tensor:
        look()
        y = forward(*inputs)
        return Looking.apply(y, look)

    return call


class Looking(torch.autograd.Function):
    """Changes nothing; looks when the gradient comes by, after earlier hooks."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, look: Callable[..., None]) -> Tensor:
        ctx.look = look
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None
