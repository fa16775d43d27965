import torch
import torch.distributed as dist


def ring_all_reduce(tensor, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    pieces = list(tensor.view(-1).tensor_split(n))
    buffer = torch.zeros(pieces[0].numel())
    i = 0
    while i < n - 1:
        out, into = pieces[(me - i - 1) % n], pieces[(me - i - 2) % n]
        req = dist.isend(out, group=group, group_dst=(me + 1) % n)
        dist.recv(buffer[: into.numel()], group=group, group_src=(me - 1) % n)
        req.wait()
        into.add_(buffer[: into.numel()])
        i += 1
    i = 0
    while i < n - 1:
        out, into = pieces[(me - i) % n], pieces[(me - i - 1) % n]
        if into.numel() == 0:
            continue  # nothing to send for an empty piece
        req = dist.isend(out, group=group, group_dst=(me + 1) % n)
        dist.recv(into, group=group, group_src=(me - 1) % n)
        req.wait()
        i += 1
