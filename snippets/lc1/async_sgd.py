# torchrun --nproc-per-node 4 snippets/lc1/async_sgd.py
import os

import torch
import torch.distributed as dist

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
target, rate = float(rank), 1.2  # rank r's loss is (w - r)^2 / 2; the mean is best


def train(update, steps=6):
    """The distance from the best w after each step."""
    w, state, distances = torch.tensor(0.0), None, []
    for _ in range(steps):
        gradient = w - target
        step, state = update(gradient, state)
        w = w - rate * step / size
        distances.append(round((w - 1.5).item(), 4))
    return distances


def synchronous(gradient, state):
    dist.all_reduce(gradient)
    return gradient, state


def asynchronous_communication(gradient, state):
    work = dist.all_reduce(gradient, async_op=True)
    _ = torch.randn(64, 64).sum()  # anything that does not need the sum
    work.wait()
    return gradient, None


def asynchronous_sgd(gradient, last):
    """Without a wait: the sum of the step before is applied, computed at an older w."""
    dist.all_reduce(gradient)
    return (torch.tensor(0.0) if last is None else last), gradient


rules = (synchronous, asynchronous_communication, asynchronous_sgd)
results = [train(rule) for rule in rules]
if rank == 0:
    for rule, distances in zip(rules, results, strict=True):
        print(f"{rule.__name__}:\n  {distances}")
assert results[0] == results[1]

dist.barrier()
dist.destroy_process_group()
