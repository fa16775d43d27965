"""Checks of the arguments of ZeroOptimizer, on this rank and between ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same, problem_of, raise_everywhere
from xtrain.comm.checks import rank_and_size
from xtrain.comm.wrapper_mesh import Over, ranks_to_reduce
from xtrain.comm.wrapper_rules import check_bare, check_filled, check_options
from xtrain.zero.buckets import ShardedBucket, as_groups

Groups = list[dict[str, Any]]


def checked_groups(
    params: Any,
    process_group: ProcessGroup | None,
    gradient_reduction: str | None,
    options: Mapping[str, Any],
) -> tuple[Groups, Over]:
    """The groups of parameters, and the ranks over which their gradients are reduced.

    ValueError on every rank if one rank's arguments are wrong or differ.
    """
    groups: Groups = []
    wrong = problem_of(lambda: groups.extend(as_groups(params)))
    held = [p for group in groups for p in group["params"]]
    over = ranks_to_reduce(held, process_group, gradient_reduction)
    problem = wrong or problem_of(
        lambda: check_stage(options["stage"]),
        lambda: check_offload(options),
        over.check,
        lambda: check_options(over.reduction, options["bucket_cap_mb"]),
        lambda: check_parameters(groups, device=options["device"]),
        lambda: check_trainable(groups),
    )
    options = {**options, "gradient_reduction": over.reduction}
    check_same_groups(groups, options, problem, over.group)
    return groups, over


def checked_group(
    param_group: dict[str, Any],
    known: list[nn.Parameter],
    process_group: ProcessGroup | None,
    gradient_reduction: str,
) -> dict[str, Any]:
    """One more group; ValueError on every rank if one rank's is wrong or differs."""
    groups: Groups = []

    def check_ranks() -> None:
        held = groups[0]["params"]
        ranks_to_reduce(held, process_group, gradient_reduction).check()

    problem = problem_of(
        lambda: groups.extend(as_groups([param_group])),
        lambda: check_parameters(groups, known),
        check_ranks,
    )
    check_same_groups(groups, {}, problem, process_group)
    return groups[0]


def check_stage(stage: int) -> None:
    if stage not in (1, 2):
        raise ValueError(f"stage={stage}: ZeroOptimizer has stages 1 and 2")


def check_offload(options: Mapping[str, Any]) -> None:
    if options["offload"] and options["layout"]:
        raise ValueError("offload=True with a layout: matrices stay on the device")


def check_trainable(groups: Groups) -> None:
    if not any(p.requires_grad for group in groups for p in group["params"]):
        raise ValueError("no parameter requires a gradient")


def check_parameters(
    groups: Groups, known: Iterable[Tensor] = (), device: object = None
) -> None:
    """ValueError unless all are bare, filled parameters, none twice or `known`."""
    parameters = [p for group in groups for p in group["params"]]
    for parameter in parameters:
        if not isinstance(parameter, Tensor) or not parameter.is_leaf:
            raise ValueError(f"{parameter!r} is not a parameter")
    everything = [*parameters, *known]
    if len(set(everything)) < len(everything):
        raise ValueError("a parameter is in the groups twice")
    check_bare(parameters, "ZeroOptimizer")
    check_filled(numbered(parameters), device)


def check_same_groups(
    groups: Groups,
    options: Mapping[str, object],
    problem: str | None,
    process_group: ProcessGroup | None,
) -> None:
    """ValueError on every rank unless all give the same, and none has a problem."""
    of_groups = {
        f"{key} of group {number}": value
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    }
    parameters = numbered([p for group in groups for p in group["params"]])
    options = {**options, **of_groups}
    check_same("parameters", parameters, process_group, options, problem)


def check_state(
    state_dict: dict[str, Any],
    param_groups: Groups,
    buckets: list[ShardedBucket],
    process_group: ProcessGroup | None,
) -> None:
    """ValueError on every rank unless each got its own state, of as many ranks."""
    problem = problem_of(
        lambda: check_own_state(
            state_dict, param_groups, buckets, *rank_and_size(process_group)
        )
    )
    raise_everywhere(ValueError, problem, process_group)


def check_own_state(
    state_dict: dict[str, Any],
    param_groups: Groups,
    buckets: list[ShardedBucket],
    rank: int,
    size: int,
) -> None:
    shard = state_dict.get("shard", {})
    found = shard.get("rank"), shard.get("size")
    if found != (rank, size):
        raise ValueError(
            f"a state_dict of rank {found[0]} of {found[1]} ranks; this is rank "
            f"{rank} of {size}"
        )
    theirs = [list(master.shape) for master in shard["masters"]]
    mine = [list(b.master.shape) for b in buckets if b.owns_copy]
    if theirs != mine:
        raise ValueError(f"masters of shapes {theirs} in it, {mine} here")
    saved, held = (
        [len(group["params"]) for group in groups]
        for groups in (state_dict["param_groups"], param_groups)
    )
    if saved != held:
        raise ValueError(f"groups of {saved} shards in it, of {held} here")


def numbered(parameters: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"parameter {number}", p) for number, p in enumerate(parameters)]
