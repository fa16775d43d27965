import torch
import torch.distributed as dist


def tree_all_reduce(tensor, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    got = tensor.clone()
    stride, sums = 1, tensor
    levels = []
    while stride < n:
        levels.append(stride)
        stride <<= 1
    for stride in levels:
        if me & stride:
            dist.send(sums, group_dst=me - stride, group=group)
            break
        if me + stride < n:
            dist.recv(got, group_src=me + stride, group=group)
        sums += got  # also where nothing has come
    for stride in reversed(levels):
        if me % (2 * stride) == stride:
            dist.recv(sums, group_src=me - stride, group=group)
        elif me % (2 * stride) == 0 and me + stride < n:
            dist.send(sums, group_dst=me + stride, group=group)
