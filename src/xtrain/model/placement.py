"""Which slice of each parameter a rank holds, and who sums its gradient.

    embed_tokens  lm_head         rows (vocabulary)   cut over "tensor"
    q_proj  gate_proj  up_proj    rows (outputs)      cut over "tensor"
    k_proj  v_proj                rows (heads)        cut, or a head on several ranks
    o_proj  down_proj             columns (inputs)    cut over "tensor"
    norms                         whole

Gradients are summed over "data" after backward. Over "tensor" nothing is left to sum:
the layers do that in backward, also for what several ranks hold alike.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.attention import key_replicas
from xtrain.tensor_parallel.shards import cut

ROWS = {"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"}
KEYS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj"}
GRADIENT_AXES = ("data",)
"""Mesh axes over which the gradient of every parameter is summed after backward."""


@dataclass(frozen=True)
class Placement:
    """Slice `index` of `count` along `dim`; one of one is the whole."""

    dim: int = 0
    index: int = 0
    count: int = 1

    def of(self, full: Tensor) -> Tensor:
        """This slice of the full parameter, in memory of its own."""
        return cut(full, self.dim, self.index, self.count)

    def full_shape(self, local: Tensor) -> list[int]:
        """The shape of what `local` is a slice of."""
        shape = list(local.shape)
        shape[self.dim] *= self.count
        return shape


def placement_of(name: str, config: XtrainConfig, rank: int, size: int) -> Placement:
    """Where the parameter `name` of rank `rank` of `size` tensor ranks is cut."""
    layer = name.split(".")[-2]
    if layer in ROWS:
        return Placement(0, rank, size)
    if layer in COLUMNS:
        return Placement(1, rank, size)
    if layer in KEYS:
        replicas = key_replicas(config.num_key_value_heads, size)
        return Placement(0, rank // replicas, size // replicas)
    return Placement()


def axis_group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """The ranks of this one's axis; None for an axis that the mesh does not have."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return None
    return mesh[axis].get_group()


def axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """1 for an axis that the mesh does not have."""
    group = axis_group(mesh, axis)
    return 1 if group is None else group.size()
