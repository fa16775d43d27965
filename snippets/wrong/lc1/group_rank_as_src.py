# torchrun --nproc-per-node 4 snippets/wrong/lc1/group_rank_as_src.py
import os

import torch
import torch.distributed as dist


def share_from_first(tensor, group):
    """Everybody in the group gets the tensor of the group's first member."""
    dist.broadcast(tensor, src=0, group=group)  # the bug: src=0 is global rank 0


def share_from_second(tensor, group):
    """The same with the group's second member."""
    dist.broadcast(tensor, src=1, group=group)  # the bug again, and no error


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    group = dist.new_group([1, 2, 3])
    if rank in (1, 2, 3):
        try:
            share_from_first(torch.tensor([10 * rank]), group)
        except ValueError as error:
            print(f"rank {rank}, src=0: {str(error).partition(' <')[0]}")
        tensor = torch.tensor([10 * rank])
        share_from_second(tensor, group)
        print(f"rank {rank}, src=1: {tensor.item()}; the second member, rank 2, has 20")
    dist.barrier()
    dist.destroy_process_group()
