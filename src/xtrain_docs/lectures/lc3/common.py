"""What trains on the pages of lc3: layers of the model under a stage of ZeRO."""

from typing import Any

import torch
from torch import Tensor, nn

from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
)

STAGES = ("0", "1", "2", "3")
KINDS = ("weights", "gradients", "optimizer state")
LAYERS = 6
WIDTH, EDGE = 400, 394  # of drawings


class Tower(nn.Module):
    """Layers of the model, each a unit of stage 3; no padding on up to 8 ranks."""

    def __init__(self, layers: int = LAYERS, width: int = 64):
        super().__init__()
        config = XtrainConfig(
            vocab_size=1, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        self.width, self.layers = width, XtrainModel(config).layers
        self.size = layers * config.layer_parameters

    def forward(self, x_BSH: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSH = layer(x_BSH, torch.arange(x_BSH.shape[1]))
        return x_BSH


class Training:
    """A tower and its optimizer, sharded by a stage; 0 is plain data parallelism.

    Args:
        bf16: bfloat16 weights with float32 masters; in stage 3 float32 shards, computed
            with in bfloat16.
        cap_mb: the size of a bucket of stages 0 to 2.
    """

    def __init__(
        self,
        stage: str,
        collectives: Collectives = TORCH,
        tower: Tower | None = None,
        bf16: bool = False,
        cap_mb: float = 25.0,
    ):
        tower = tower or Tower()
        self.width = tower.width
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.buckets: list[Any] = []
        self.model: Any
        self.optimizer: Any
        if stage == "3":
            self.model = FullyShardedDataParallel(
                tower,
                compute_dtype=torch.bfloat16 if bf16 else None,
                collectives=collectives,
            )
            self.optimizer = self.inner = AdamW(self.model.parameters())
            return
        bucket = {"bucket_cap_mb": cap_mb, "collectives": collectives}
        self.model = tower.to(self.dtype)
        if stage == "0":
            self.model = DistributedDataParallel(tower, **bucket)
            self.optimizer = MixedPrecisionOptimizer(self.model.parameters(), AdamW)
        else:
            self.optimizer = ZeroOptimizer(
                tower.parameters(), AdamW, stage=int(stage), **bucket
            )
            self.buckets = self.optimizer.buckets
        self.inner = self.optimizer.optimizer

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What the optimizer inside steps: shards, masters, or the weights."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def forward(self, tokens: int = 2) -> Tensor:
        """The loss of a batch of ones."""
        x = torch.ones(1, tokens, self.width, dtype=self.dtype)
        loss: Tensor = self.model(x).float().square().mean()
        return loss

    def second_backward(self) -> None:
        """A step, and the next one's backward: as it is in the middle of training."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.forward().backward()
