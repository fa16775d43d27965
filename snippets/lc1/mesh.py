# torchrun --nproc-per-node 8 snippets/lc1/mesh.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh, mesh_coordinates

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

shapes = {
    ("data",): (8,),
    ("data", "tensor"): (2, 4),
    ("pipeline", "data", "tensor"): (2, 2, 2),
}
for axes, shape in shapes.items():
    mesh = init_mesh(shape, axes)
    place = mesh_coordinates(rank, shape)
    assert tuple(mesh.get_coordinate()) == place
    if rank == 5:
        print(f"mesh {shape}: rank 5 has coordinates {place}")
    for axis in axes:
        group = mesh[axis].get_group()
        digits = torch.tensor(10**rank)  # digit r of the sum: rank r took part
        dist.all_reduce(digits, group=group)
        if rank == 5:
            members = dist.get_process_group_ranks(group)
            print(f"  {axis:8} group {members}, all-reduce {digits.item():08d}")

try:
    init_mesh((3, 2), ("data", "tensor"))
except ValueError as error:
    if rank == 5:
        print(error)

dist.barrier()
dist.destroy_process_group()
