import torch
import torch.distributed as dist


def ring_reduce_scatter(output, input, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    blocks = [b.clone() for b in input.flatten().chunk(n)]
    todo = blocks[(me - 1) % n]
    for k in range(n - 1):
        got = torch.empty_like(todo)
        sending = dist.isend(todo, group_dst=(me + 1) % n, group=group)
        receiving = dist.irecv(got, group_src=(me - 1) % n, group=group)
        sending.wait()
        receiving.wait()
        todo = got + blocks[me + n - 2 - k]
    output.copy_(todo.view_as(output))
