# torchrun --nproc-per-node 2 snippets/wrong/lc6/local_positions.py
import os

import torch
import torch.distributed as dist

from xtrain.whiteboard.context_parallel.shard_sequence import shard_sequence


def from_zero(length, balance):
    return torch.arange(length)  # the bug: right for the first tokens only


def of_a_run(length, balance):
    rank = dist.get_rank()
    return rank * length + torch.arange(length)  # the bug: zigzag is not a run


def of_the_cut(length, balance):
    return shard_sequence(torch.arange(length * dist.get_world_size()), 0, balance)


def turned(x, positions):
    """Rotary: x [S, 2], each row by its position."""
    angle = torch.polar(torch.ones(len(x)).to(x), 0.5 * positions.to(x))
    return torch.view_as_real(torch.view_as_complex(x.contiguous()) * angle)


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def attention(q, k, v, balance, positions_of):
    """Causal, with rotary positions; each rank has S / N of q, k and v."""
    mine, keys = positions_of(len(q), balance), of_the_cut(len(k), balance)
    scores = turned(q, mine) @ gathered(turned(k, keys)).mT
    seen = gathered(keys) <= mine.unsqueeze(1)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ gathered(v)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 2) for _ in range(3))
    tokens, hidden = torch.arange(8), torch.full((8, 8), -torch.inf).triu(1)
    whole = (turned(q, tokens) @ turned(k, tokens).mT + hidden).softmax(-1) @ v
    for balance in ("none", "zigzag"):
        mine = [shard_sequence(x, 0, balance) for x in (q, k, v, whole)]
        for rule in (from_zero, of_a_run, of_the_cut):
            wrong = (attention(*mine[:3], balance, rule) - mine[3]).norm(dim=1)
            print(f"rank {rank}, {balance:6}, {rule.__name__:10}: error of its tokens "
                  f"{[f'{x:.2f}' for x in wrong]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
