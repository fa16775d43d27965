import torch
import torch.distributed as dist


class NaiveDataParallel(torch.nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        self.pg = process_group
        self.world = dist.get_world_size(process_group)
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.data, group=process_group, group_src=0)

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def reduce_gradients(self):
        used = [p for p in self.module.parameters() if p.requires_grad]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        # each rank begins with another parameter, so that the network is used evenly
        first = dist.get_rank(self.pg) % len(used)
        for p in used[first:] + used[:first]:
            dist.all_reduce(p.grad, group=self.pg)
            p.grad.div_(self.world)
