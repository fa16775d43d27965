# torchrun --nproc-per-node 2 snippets/wrong/lc4/dx_not_summed.py
import os

import torch
import torch.distributed as dist


def column_linear(x, shard):
    """x [T, K], whole on every rank, times this rank's rows [O / N, K] of W."""
    return x @ shard.t()  # the bug: backward gives this rank's part of dX


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]])
    x, whole = (torch.ones(1, 2, requires_grad=True) for _ in range(2))
    shard = weight.chunk(2)[rank].clone().requires_grad_()
    y = column_linear(x, shard)
    y.backward(torch.ones_like(y))
    (whole @ weight.t()).sum().backward()
    print(f"rank {rank}: dW {shard.grad.tolist()}, dX {x.grad.tolist()[0]}, "
          f"right is {whole.grad.tolist()[0]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
