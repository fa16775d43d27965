"""Functions that run on every rank for tables of lc3: torch's own, files."""

import json
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import TORCH
from xtrain.model.layer import DecoderLayer
from xtrain.zero import FullyShardedDataParallel

from .runs import nbytes
from .runs_training import WIDTH, Tower, Training


def settings(kind: str) -> dict[str, int]:
    """Weights at rest, and the collectives of a step, of FSDP in some setting.

    Args:
        kind: a `ShardingStrategy` of FSDP1, or "fully_shard" or "ours", followed by
            "freed" or "kept" for what becomes of the weights after forward.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp import ShardingStrategy, fully_shard

    warnings.simplefilter("ignore")  # FSDP1 says that it is slow on CPUs
    tower = Tower()
    model: nn.Module = tower
    name, _, after = kind.partition(" ")
    if name == "fully_shard":
        for layer in tower.layers:
            fully_shard(layer, reshard_after_forward=after == "freed")
        fully_shard(tower, reshard_after_forward=after == "freed")
    elif name == "ours":
        model = FullyShardedDataParallel(
            tower, reshard_after_forward=after == "freed", collectives=TORCH
        )
    else:
        model = FSDP1(
            tower,
            sharding_strategy=ShardingStrategy[name],
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
                recurse or isinstance(module, DecoderLayer)
            ),
        )
    local = (getattr(p, "_local_tensor", p) for p in model.parameters())
    weights = nbytes(local)
    with CommLedger() as ledger:
        model(torch.ones(1, 2, WIDTH)).sum().backward()
    calls = [event.op for event in ledger.events if event.kind == "collective"]
    kinds = {"gathers": "gather", "scatters": "reduce_scatter", "reduces": "allreduce"}
    return {
        "weights": weights,
        **{key: sum(word in op for op in calls) for key, word in kinds.items()},
    }


def checkpoint_files() -> dict[str, int]:
    """Bytes of this rank's file by what they hold, and of the index.

    A safetensors file begins with the length of its header, in eight bytes, and the
    header: JSON that has the shape and place of every tensor.
    """
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    training = Training("3")
    for _ in range(2):
        training.step()
    path = training.model.save_sharded(folder[0], 2, training.optimizer)
    content = (Path(path) / f"rank-{dist.get_rank():05d}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    cut = [  # weights, and what is cut like them; random states and steps are not
        last - first
        for name, entry in header.items()
        if not name.startswith(":") or name.startswith(":cut:")
        for first, last in [entry["data_offsets"]]
    ]
    sizes = {
        "state": sum(cut),
        "rest": len(content) - sum(cut),
        "index": (Path(path) / "index.json").stat().st_size,
    }
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return sizes
