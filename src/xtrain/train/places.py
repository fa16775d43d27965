"""How a rank is named to a reader: its number, and its place on each axis."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def place_of(mesh: DeviceMesh, host: str = "") -> str:
    """This rank, as "rank 3 (data 1, tensor 1; host b)".

    Args:
        mesh: of the layout; axes of one rank are left out.
        host: its name, if it is to be told.
    """
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    several = [(name, i) for i, (name, size) in enumerate(sizes) if size > 1]
    coordinate = list(mesh.get_coordinate() or ())
    where = ", ".join(f"{name} {coordinate[i]}" for name, i in several)
    where = "; ".join(part for part in (where, host and f"host {host}") if part)
    return f"rank {dist.get_rank()}" + (f" ({where})" if where else "")
