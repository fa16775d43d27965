# torchrun --nproc-per-node 2 snippets/wrong/lc7/router_partial.py
import os

import torch
import torch.distributed as dist

from xtrain.expert_parallel import GShardMoE, MoE


def like_an_expert(layer):
    """Sums of gradients over the ranks that have the same parameter."""
    # The bug: no rank has the same experts, so all of the layer is left as it is.


def like_dense(layer):
    dist.all_reduce(layer.router.weight.grad)


def train(full, x, sum_gradients, steps=3):
    """A few steps of SGD on this rank's tokens; the layer."""
    layer, size = GShardMoE.from_full(full), dist.get_world_size()
    for _ in range(steps):
        layer.zero_grad()
        ((layer(x) - x).square().sum() / (len(x) * size)).backward()
        sum_gradients(layer)
        with torch.no_grad():
            for weight in layer.parameters():
                weight -= 0.5 * weight.grad
    return layer


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    full, x = MoE(4, 6, num_experts=4, top_k=2), torch.randn(16, 4)
    for sum_gradients in (like_an_expert, like_dense):
        layer = train(full, x.chunk(size)[rank], sum_gradients)
        first = layer.router.weight.detach().clone()
        dist.broadcast(first, 0)
        apart = (layer.router.weight - first).norm() / first.norm()
        loads = layer.router(x).counts_E.tolist()
        print(f"rank {rank}, {sum_gradients.__name__:14}: router's distance from rank "
              f"0's {apart:.3f}, loads of the same 16 tokens {loads}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
