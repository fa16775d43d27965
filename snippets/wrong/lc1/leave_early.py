# torchrun --nproc-per-node 2 snippets/wrong/lc1/leave_early.py
import time

import torch
import torch.distributed as dist


def program():
    """Rank 0 starts a send and goes home; rank 1 is a little late."""
    tensor = torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)  # the bug: this handle is not waited for,
        dist.destroy_process_group()  # and the connection closes under the message
        return work
    time.sleep(0.5)
    dist.recv(tensor.zero_(), 0)
    return tensor


if __name__ == "__main__":
    # On gloo, where a closed connection ends the receive; NCCL would go on waiting.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # both are connected before one of them leaves
    try:
        program()
        print(f"rank {rank} is done")
    except RuntimeError as error:
        reason = str(error).partition(" [127.")[0].rpartition("] ")[2]
        print(f"rank {rank}: {reason}")
