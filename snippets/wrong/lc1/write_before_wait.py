# torchrun --nproc-per-node 2 snippets/wrong/lc1/write_before_wait.py
import torch
import torch.distributed as dist


def transfer(value):
    """Rank 0 sends `value` to rank 1, which returns what came."""
    tensor = torch.full((3,), value)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        tensor.zero_()  # the bug: the message may not have left yet
        dist.barrier()
        work.wait()
    else:
        dist.barrier()  # rank 1 comes late to the receive, as it may
        dist.recv(tensor, 0)
    return tensor


if __name__ == "__main__":
    # On gloo: NCCL connects two ranks in their first call, here before the barrier.
    dist.init_process_group("gloo")
    received = transfer(7.0)
    if dist.get_rank() == 1:
        print(f"rank 0 sent sevens, rank 1 received {received.tolist()}")
    dist.barrier()
    dist.destroy_process_group()
