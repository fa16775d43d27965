"""The jobs of the hang lab: each is a small training program with one fault.

    rank 0   all_reduce   all_reduce   all_reduce   waits
    rank 1   all_reduce   all_reduce   all_reduce   waits
    rank 2   all_reduce   all_reduce                 ?

A job is called on every rank with its rank and the number of ranks, after
`init_process_group` on gloo. Names and comments tell what a job is for, as in a program
whose author knows of no fault; what is wrong stands in `faults.toml`. The cost is that
of the group's timeout, seconds.
"""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

SECONDS = timedelta(seconds=3)  # a call may take; the default is half an hour


def run_epoch(rank: int, size: int) -> None:
    """Files are dealt out to the ranks, a batch a file."""
    files = [f"part-{number:02}" for number in range(11)]
    for step, _ in enumerate(files[rank::size]):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        print(f"step {step}")
    print("epoch done")


def train_and_save(rank: int, size: int) -> None:
    """Rank 0 saves after every second step."""
    for step in range(4):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        print(f"step {step}")
        if rank == 0 and step % 2 == 1:
            print("saved; waiting for the others")
            dist.barrier()


def reduce_in_two_groups(rank: int, size: int) -> None:
    """Gradients and metrics have a group each."""
    groups = {
        "gradients": dist.new_group(timeout=SECONDS),
        "metrics": dist.new_group(timeout=SECONDS),
    }
    # As the order of a set of strings, which differs between processes.
    names = sorted(groups, reverse=rank == 1)
    for name in names:
        dist.all_reduce(torch.ones(1000), group=groups[name])
    print("step 0")


def run_pipeline(rank: int, size: int) -> None:
    """Each stage receives a micro-batch, computes and sends it on."""
    micro_batches = 4
    for _ in range(micro_batches - (rank == 1)):
        activations = torch.ones(256, 4096)
        if rank > 0:
            dist.recv(activations, rank - 1)
        if rank < size - 1:
            dist.send(activations, rank + 1)
    print("forward done")
    dist.all_reduce(torch.ones(1))


def pass_blocks_around(rank: int, size: int) -> None:
    """Ring attention: keys and values go one rank on in each step."""
    keys, incoming = torch.ones(256, 4096), torch.empty(256, 4096)
    for step in range(size - 1):
        dist.send(keys, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)
        keys, incoming = incoming, keys
        print(f"block {step}")


def train_on_labels(rank: int, size: int) -> None:
    """Labels are looked up by name."""
    numbers = {"cat": 0, "dog": 1}
    labels = [["cat", "dog", "cat"], ["dog", "dog", "cat"], ["cat", "cow", "dog"]]
    for step, label in enumerate(labels[rank]):
        loss = torch.tensor(float(numbers[label]))
        dist.all_reduce(loss)
        print(f"step {step}")


def train_with_a_cache(rank: int, size: int) -> None:
    """Rank 1 keeps every batch; the machine has only so much memory."""
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
        dist.all_reduce(torch.ones(1000))
        print(f"step {step}")


def train_beside_others(rank: int, size: int) -> None:
    """The machine is shared, and someone pauses a process of it."""
    for step in range(4):
        if rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1000))
        print(f"step {step}")


def read_batch(rank: int, step: int) -> torch.Tensor:
    """Reads from a disk that all ranks share."""
    if rank == 1 and step == 2:
        time.sleep(2.5)
    return torch.ones(1000)


def train_from_a_disk(rank: int, size: int) -> None:
    """A step reads, computes and sums."""
    for step in range(4):
        start = time.monotonic()
        batch = read_batch(rank, step)
        dist.all_reduce(batch)
        print(f"step {step}: {time.monotonic() - start:.1f} s")


def sum_expert_gradients(rank: int, size: int) -> None:
    """The last two ranks share an expert; metrics have a group of all ranks."""
    if rank > 0:
        pair = dist.new_group([1, 2], timeout=SECONDS)
        dist.all_reduce(torch.ones(1000), group=pair)
        print("gradients of the expert summed")
    dist.all_reduce(torch.ones(1000))
    metrics = dist.new_group(timeout=SECONDS)
    dist.all_reduce(torch.ones(1), group=metrics)
    print("step 0")


def exchange_tokens(rank: int, size: int) -> None:
    """Tokens go to the ranks of their experts."""
    tokens_by_rank = [[2, 1, 3], [3, 3, 0], [0, 0, 0]]
    sent = tokens_by_rank[rank]
    received = [tokens[rank] for tokens in tokens_by_rank]
    if sum(sent) > 0:
        tokens, out = torch.ones(sum(sent), 64), torch.empty(sum(received), 64)
        dist.all_to_all_single(out, tokens, received, sent)
        print(f"{len(out)} tokens received")
    dist.all_reduce(torch.ones(1))
    print("step 0")


def average_metrics(rank: int, size: int) -> None:
    """The loss of each rank comes as a plain number."""
    losses = [1.5, 2.5, 2.0]
    loss = torch.tensor([losses[rank]])
    if rank == 1:
        loss = torch.from_numpy(np.array([losses[rank]]))  # NaN were filtered out
    dist.all_reduce(loss)
    print(f"mean loss {loss.item() / size:.3f}")
