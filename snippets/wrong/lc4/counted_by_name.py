# torchrun --nproc-per-node 2 snippets/wrong/lc4/counted_by_name.py
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from xtrain.model import XtrainConfig, XtrainModel

CUT = ("attn", "attention", "mlp", "embed", "lm_head")


def count(model):
    """Parameters of the whole model, from this rank's shards."""
    total, size = 0, dist.get_world_size()
    for name, parameter in model.named_parameters():
        cut = any(word in name for word in CUT)  # the bug: the name decides
        total += parameter.numel() * (size if cut else 1)
    return total


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = torch.get_default_device().type
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("tensor",))
    for key_heads in (2, 1):
        config = XtrainConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=key_heads,
        )  # fmt: skip
        counted = count(XtrainModel(config, mesh))
        print(f"rank {rank}, {key_heads} key heads: counted {counted}, "
              f"there are {config.parameters}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
