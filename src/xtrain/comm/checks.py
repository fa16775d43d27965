"""What a rank sees of its group, and rules about tensors that a call states.

A rule is whether it holds, and the message if not: `xtrain.comm.calls.check_call` takes
them with the call.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Rule = tuple[bool, str]  # whether it holds, and the message if not


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """`group`, or the default group for None."""
    world = dist.group.WORLD
    if world is None:
        raise ValueError("no process group: call dist.init_process_group first")
    return world if group is None else group


def message_device(group: ProcessGroup | None) -> torch.device:
    """Where messages of our own making live: the CPU if the backend serves it."""
    cpu, served = torch.device("cpu"), group_or_world(group)._device_types
    return cpu if cpu in served else served[0]


def rank_and_size(group: ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in `group` and the group's size; ValueError outside it."""
    group = group_or_world(group)
    if not isinstance(group, ProcessGroup) or group.rank() < 0:
        # torch hands the int -100 to processes that are not members.
        raise ValueError(f"global rank {dist.get_rank()} is not a member of this group")
    return group.rank(), group.size()


def holds_all(whole: Tensor, part: Tensor, group: ProcessGroup | None) -> Rule:
    """A rule: `whole` has as many elements as the `part`s of all ranks."""
    _, size = rank_and_size(group)
    message = f"{shape_of(whole)} must hold {size} times {shape_of(part)}"
    both = isinstance(whole, Tensor) and isinstance(part, Tensor)
    return both and whole.numel() == size * part.numel(), message


def are_contiguous(*tensors: Tensor) -> Rule:
    """A rule: no gaps in memory, the last dimension runs fastest."""
    holds = all(isinstance(t, Tensor) and t.is_contiguous() for t in tensors)
    return holds, "needs contiguous tensors"


def shape_of(tensor: object) -> object:
    """The shape in a message, or the type of what is not a tensor."""
    return list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
