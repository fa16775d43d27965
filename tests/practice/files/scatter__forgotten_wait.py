import torch.distributed as dist


def scatter(tensor, scatter_list=None, src=0, group=None):
    if dist.get_rank() == src:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        for member, item in zip(members, scatter_list):
            if member == src:
                tensor.copy_(item)
            else:
                dist.isend(item, dst=member, group=group)
    else:
        dist.recv(tensor, src=src, group=group)
