"""Functions that run on every rank for the questions of lc4."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import RING
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.zero import FullyShardedDataParallel

from .runs_errata import collectives_of

VOCABULARY, LAYERS = 8, 2


def config_of(width: int) -> XtrainConfig:
    """Two layers of sizes that divide by up to 4 ranks."""
    return XtrainConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )


def bytes_of_step(kind: str, width: int, sequence: int) -> int:
    """Bytes that this rank sends in forward and backward, over our ring.

    Args:
        kind: "tensor parallelism" or "ZeRO-3".
    """
    size = rank_and_size(None)[1]
    model: Any
    if kind == "ZeRO-3":
        model = FullyShardedDataParallel(
            XtrainModel(config_of(width)), collectives=RING
        )
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
        model = XtrainModel(config_of(width), mesh)
    tokens = torch.arange(sequence).view(1, sequence) % VOCABULARY
    with collectives_of("ring"), CommLedger() as ledger:
        model(tokens, tokens).backward()
    return ledger.bytes_sent
