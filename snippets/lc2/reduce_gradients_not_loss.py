# torchrun --nproc-per-node 2 snippets/lc2/reduce_gradients_not_loss.py
import os

import torch
import torch.distributed as dist

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()


def gradient(reduce_loss: bool, reduce_gradient: bool) -> str:
    weight = torch.tensor(1.0, requires_grad=True)
    sample = torch.tensor(3.0 + 2 * rank)  # rank 0 has 3, rank 1 has 5
    loss = weight * sample  # so the gradient is the sample
    if reduce_loss:
        dist.all_reduce(loss.detach())  # writes the sum into the loss itself
        loss.detach().div_(size)
    loss.backward()
    if reduce_gradient:
        dist.all_reduce(weight.grad)
        weight.grad /= size
    return f"loss {loss.item():g}, gradient {weight.grad.item():g}"


print(f"rank {rank}, nothing reduced:   {gradient(False, False)}")
print(f"rank {rank}, loss reduced:      {gradient(True, False)}")
print(f"rank {rank}, gradient reduced:  {gradient(False, True)}")

dist.barrier()
dist.destroy_process_group()
