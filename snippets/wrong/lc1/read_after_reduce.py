# torchrun --nproc-per-node 4 snippets/wrong/lc1/read_after_reduce.py
import torch
import torch.distributed as dist


def mean_loss(loss):
    """The mean over all ranks, for the log and for early stopping."""
    dist.reduce(loss, dst=0)
    return loss / dist.get_world_size()  # the bug: true on rank 0 alone


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mean = mean_loss(torch.tensor([1.0 + rank]))
    print(f"rank {rank}: mean loss {mean.item()}, stop below 2: {mean.item() < 2}")
    dist.barrier()
    dist.destroy_process_group()
