import torch
import torch.distributed as dist


def ring_all_reduce(tensor, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    if me == 0:
        parts = [torch.empty_like(tensor) for _ in range(n - 1)]
        for peer, part in enumerate(parts, start=1):
            dist.recv(part, group_src=peer, group=group)
            tensor += part
        reqs = [dist.isend(tensor, group_dst=p, group=group) for p in range(1, n)]
        for req in reqs:
            req.wait()
    else:
        dist.send(tensor, group_dst=0, group=group)
        dist.recv(tensor, group_src=0, group=group)
