"""How a collective checks its call: one function, before its first message leaves.

    rank, size = check_call("ring_all_reduce", group, tensor, op=op)

What this rank can see wrong is refused by the rules of `local_checks`. Under
`debug_checks` all ranks compare their calls first, and all refuse them together.
"""

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.debug_checks import compare_across_ranks, comparing
from xtrain.comm.local_checks import CheckedCall, local_problem


def check_call(
    name: str, group: ProcessGroup | None, *tensors: Tensor, **more: Any
) -> tuple[int, int]:
    """ValueError for a bad call of a collective, else `rank_and_size(group)`.

    Args:
        more: what else the call states, see `local_checks.CheckedCall`.
    """
    place = rank_and_size(group)
    call = CheckedCall(name, group, tensors, **more)
    problem = local_problem(call)
    if comparing():
        compare_across_ranks(call, problem)
    elif problem is not None:
        raise ValueError(f"{name}: {problem}")
    return place


def refuse(name: str, group: ProcessGroup | None, problem: str) -> NoReturn:
    """ValueError for a collective call; under `debug_checks` on every rank."""
    check_call(name, group, rules=[(False, problem)])
    raise AssertionError("unreachable: the rule above does not hold")
