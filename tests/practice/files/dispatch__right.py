import torch
import torch.distributed as dist


def dispatch(x, experts, num_experts, group=None):
    n = dist.get_world_size(group)
    local = num_experts // n
    copies = [[] for _ in range(num_experts)]  # of each expert: numbers of copies
    for token, choice in enumerate(experts.tolist()):
        for j, e in enumerate(choice):
            copies[e].append(token * len(choice) + j)
    order = [c for of_one in copies for c in of_one]
    counts_out = torch.tensor([len(of_one) for of_one in copies])
    counts_in = torch.zeros(num_experts, dtype=torch.int64)
    dist.all_to_all_single(counts_in, counts_out, group=group)
    send = [int(part.sum()) for part in counts_out.split(local)]
    recv = [int(part.sum()) for part in counts_in.split(local)]

    k = experts.size(1)
    leaving = x[torch.tensor(order, dtype=torch.int64) // k]
    arrived = torch.zeros(sum(recv), x.size(1), dtype=x.dtype)
    dist.all_to_all_single(arrived, leaving, recv, send, group=group)

    boxes = list(arrived.split(counts_in.tolist()))  # [sender, local expert]
    by_expert = [boxes[r * local + e] for e in range(local) for r in range(n)]
    place = list(torch.arange(sum(recv)).split(counts_in.tolist()))
    place = torch.cat([place[r * local + e] for e in range(local) for r in range(n)])
    lengths = counts_in.view(n, local).sum(0)
    return torch.cat(by_expert), lengths, (torch.tensor(order), place, send, recv, group)
