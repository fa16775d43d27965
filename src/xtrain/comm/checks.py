"""What an algorithm states about its call, so that a bad one is refused.

    ring_all_reduce -> run_checks("collective", name, group, [tensor], op=op)
                         -> CHECKS: the rules of `local_checks`, or while `debug_checks`
                            are on those and the question to the other ranks

Every collective of `xtrain.comm` begins with `run_checks`, or with `check_call` if it
has rules of its own. What is asked of a call is not decided here: `xtrain.comm` fills
CHECKS when it is imported, and nothing fills it in a copy of an algorithm, where only
the `rules` that come with the call hold. What else a call may say of itself stands in
`local_checks.Call`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Rule = tuple[bool, str]  # whether it holds, and the message if not

CHECKS: dict[str, Callable[..., None]] = {}  # by kind of call; filled by xtrain.comm


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


def check_call(
    name: str, group: ProcessGroup | None, *tensors: Tensor, **more: Any
) -> tuple[int, int]:
    """Refuse a bad call of a collective, else return `rank_and_size(group)`.

    Each of `rules` is whether it holds, and the message if not.
    """
    place = rank_and_size(group)
    run_checks("collective", name, group, tensors, **more)
    for holds, message in more.get("rules", ()):
        if not holds:
            raise ValueError(f"{name}: {message}")
    return place


def run_checks(kind: str, *call: Any, **more: Any) -> None:
    """Refuse a bad call, by what CHECKS has for its kind."""
    if kind in CHECKS:
        CHECKS[kind](*call, **more)


def refuse(name: str, group: ProcessGroup | None, problem: str) -> NoReturn:
    """Raise ValueError for a collective call; under `debug_checks` on every rank."""
    check_call(name, group, rules=[(False, problem)])
    raise AssertionError("unreachable: the rule above does not hold")


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
    """For what is compared and told before it is known to be a tensor."""
    return list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
