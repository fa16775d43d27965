# python snippets/lc1/available_backends.py
import torch
import torch.distributed as dist

from xtrain.backends import register

register()  # makes torch know "xtrain-shm" and "xtrain-socket"
print("torch can communicate:", dist.is_available())

in_this_torch = {
    "gloo": dist.is_gloo_available(),
    "nccl": dist.is_nccl_available() and torch.cuda.is_available(),  # it needs a GPU
    "mpi": dist.is_mpi_available(),
    "xtrain-shm": True,
    "xtrain-socket": True,
}
for name, there in in_this_torch.items():
    if not there:
        print(f"{name:13} not here")
        continue
    # A group of one rank is enough to see whether the backend starts.
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor.cuda() if name == "nccl" else tensor)
    print(f"{name:13} starts; get_backend() is {dist.get_backend()!r}")
    dist.destroy_process_group()

try:
    dist.init_process_group("mpi")
except RuntimeError as error:
    print("\nasking for MPI all the same:", error)
