import torch.distributed as dist


def ring_all_reduce(tensor, group=None):
    """Sum over the ring."""
    summed = tensor.clone()
    dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=group)
    tensor.copy_(summed)
