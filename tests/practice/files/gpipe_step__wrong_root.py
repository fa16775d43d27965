import torch
import torch.distributed as dist


def gpipe_step(
    stage, loss_fn, inputs, targets, micro_batches, activation, group=None
):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    is_first, is_last = me == 0, me == n - 1
    loss_sum, tokens, saved, pending = 0.0, 0, [], []
    for mb in range(micro_batches):
        if is_first:
            h = inputs.chunk(micro_batches)[mb]
        else:
            h = torch.zeros_like(activation)
            dist.recv(h, group_src=me - 1, group=group)
            h.requires_grad_(True)
        out = stage(h)
        if is_last:
            out, c = loss_fn(out, targets.chunk(micro_batches)[mb])
            loss_sum, tokens = loss_sum + out.item(), tokens + int(c)
        else:
            pending.append(dist.isend(out.detach(), group_dst=me + 1, group=group))
        saved.append((h, out))
    for h, out in saved:
        if is_last:
            out.backward()
        else:
            g = torch.zeros_like(activation)
            dist.recv(g, group_src=me + 1, group=group)
            out.backward(g)
        if not is_first:
            pending.append(dist.isend(h.grad, group_dst=me - 1, group=group))
    [p.wait() for p in pending]
    stats = torch.tensor([loss_sum, tokens], dtype=torch.float64)
    dist.broadcast(stats, group_src=0, group=group)  # rank 0 knows no loss
    for w in stage.parameters():
        w.grad.div_(stats[1])
    return stats[0] / stats[1]
