# torchrun --nproc-per-node 2 snippets/wrong/lc1/read_before_wait.py
import torch
import torch.distributed as dist


def transfer(value):
    """Rank 0 sends `value` to rank 1, which returns what came."""
    if dist.get_rank() == 0:
        dist.barrier()  # rank 0 comes late to the send, as it may
        dist.send(torch.full((3,), value), 1)
        return torch.full((3,), value)
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, 0)
    doubled = 2 * tensor  # the bug: nothing has arrived yet
    dist.barrier()
    work.wait()
    return doubled / 2


if __name__ == "__main__":
    # On gloo: NCCL connects two ranks in their first call, here before the barrier.
    dist.init_process_group("gloo")
    received = transfer(7.0)
    if dist.get_rank() == 1:
        print(f"rank 0 sent sevens, rank 1 computed with {received.tolist()}")
    dist.barrier()
    dist.destroy_process_group()
