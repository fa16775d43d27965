# torchrun --nproc-per-node 2 snippets/wrong/lc5/tags.py
import torch
import torch.distributed as dist


def two_messages(activation, gradient, tags):
    """Rank 0's two tensors become rank 1's. NCCL takes no notice of tags."""
    first, second = (1, 2) if tags else (0, 0)
    if dist.get_rank() == 0:
        works = [
            dist.isend(activation, 1, tag=first),
            dist.isend(gradient, 1, tag=second),
        ]
    else:  # the bug: in another order than they were sent, only tags tell them apart
        works = [
            dist.irecv(gradient, 0, tag=second),
            dist.irecv(activation, 0, tag=first),
        ]
    for work in works:
        work.wait()


if __name__ == "__main__":
    # On gloo, which reads tags.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for tags in (True, False):
        activation, gradient = torch.tensor([1.0]), torch.tensor([2.0])
        if rank == 1:
            activation, gradient = torch.empty(1), torch.empty(1)
        two_messages(activation, gradient, tags)
        how = "with" if tags else "without"
        values = f"activation {activation.item()}, gradient {gradient.item()}"
        print(f"rank {rank}, {how} tags: {values}")

    dist.barrier()
    dist.destroy_process_group()
