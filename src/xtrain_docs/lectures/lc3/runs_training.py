"""A model in training under every stage of ZeRO, for the runs of lc3."""

from typing import Any

import torch
from torch import Tensor, nn

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
        self.width, self.cap = width, cap_kib / 1024
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.sharded: list[Any] = []
        tower = tower or Tower(width=width)
        self.model: Any
        self.optimizer: Any
        if stage.startswith("3"):
            self.make_fsdp(tower, choice, keep=stage != "3")
        elif stage == "0":
            self.make_ddp(tower, choice)
        else:
            self.make_zero(tower, choice, int(stage))

    def make_fsdp(self, tower: Tower, collectives: Collectives, keep: bool) -> None:
        """Stage 3: parameters, gradients and optimizer state are sharded."""
        self.model = FullyShardedDataParallel(
            tower,
            compute_dtype=self.dtype if self.dtype == torch.bfloat16 else None,
            reshard_after_forward=not keep,
            collectives=collectives,
        )
        self.optimizer = self.inner = AdamW(self.model.parameters(), lr=1e-3)

    def make_ddp(self, tower: Tower, collectives: Collectives) -> None:
        """Nothing is sharded."""
        self.model = DistributedDataParallel(
            tower.to(self.dtype), bucket_cap_mb=self.cap, collectives=collectives
        )
        parameters = self.model.parameters()
        self.optimizer = MixedPrecisionOptimizer(parameters, AdamW, lr=1e-3)
        self.inner = self.optimizer.optimizer

    def make_zero(self, tower: Tower, collectives: Collectives, stage: int) -> None:
        """Stage 1 or 2: the optimizer shards, and the model stays whole."""
        self.model = tower.to(self.dtype)
        self.optimizer = ZeroOptimizer(
            self.model.parameters(),
            AdamW,
            stage=stage,
            bucket_cap_mb=self.cap,
            collectives=collectives,
            lr=1e-3,
        )
        self.inner = self.optimizer.optimizer
        self.sharded = self.optimizer.buckets

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
