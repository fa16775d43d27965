# torchrun --nproc-per-node 2 snippets/wrong/lc7/expert_scale.py
import os

import torch
import torch.distributed as dist

from xtrain.expert_parallel import GShardMoE, MoE


def mean_of_own(layer, x):
    """Each rank's loss is the mean of its tokens, so gradients are averaged."""
    layer(x).square().sum(-1).mean().backward()
    # The bug: an expert has got the gradients of all ranks' tokens, in a sum.
    dist.all_reduce(layer.router.weight.grad)
    layer.router.weight.grad /= dist.get_world_size()


def averaged_again(layer, x):
    divided_once(layer, x)
    for weight in layer.experts.parameters():
        weight.grad /= dist.get_world_size()  # the bug: the loss has been divided


def divided_once(layer, x):
    """By the tokens of all ranks; then gradients are sums, those of experts already."""
    (layer(x).square().sum() / (len(x) * dist.get_world_size())).backward()
    dist.all_reduce(layer.router.weight.grad)


def ratios(full, x, rule):
    """A rank's gradients over those of one process: of the router, of its experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    full.zero_grad()
    full(x).square().sum(-1).mean().backward()
    layer = GShardMoE.from_full(full)
    rule(layer, x.chunk(size)[rank])
    right = full.experts.down_proj.grad.chunk(size)[rank]
    pairs = (layer.router.weight.grad, full.router.weight.grad), (
        layer.experts.down_proj.grad, right,
    )  # fmt: skip
    return [(found * right).sum() / right.square().sum() for found, right in pairs]


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    torch.manual_seed(0)
    full, x = MoE(4, 6, num_experts=4, top_k=2), torch.randn(16, 4)
    for rule in (mean_of_own, averaged_again, divided_once):
        router, experts = ratios(full, x, rule)
        print(f"rank {dist.get_rank()}, {rule.__name__:14}: times the right gradient: "
              f"router {router:.2f}, experts {experts:.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
