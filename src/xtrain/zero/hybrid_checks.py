"""Checks of the two groups of hybrid sharding, before anything is sharded.

    inner groups are rows         0 1 2        rank 4: inner [3, 4, 5], outer [1, 4],
    outer groups are columns      3 4 5                its shard is 1 of 3, its copy 1

No group holds all ranks yet. So a problem goes along the row, then along all columns
of that row, and once more along rows, for those whose columns are wrong.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import (
    check_same,
    problem_of,
    raise_everywhere,
    values_of_all,
)
from xtrain.comm.checks import group_or_world, rank_and_size


def problem_with_sizes(inner_size: Any, size: int) -> str | None:
    """What is wrong with inner groups of this size; None if they fit."""
    if type(inner_size) is not int or inner_size < 1:
        return f"inner_size={inner_size!r} is not a whole number from 1 up"
    if size % inner_size:
        return f"inner_size={inner_size} does not divide the {size} ranks of the group"
    return None


def check_grid(inner: ProcessGroup | None, outer: ProcessGroup) -> list[list[int]]:
    """The global ranks of all rows; ValueError on every rank unless it is a grid."""
    problem = problem_of(lambda: check_member(inner), lambda: check_member(outer))
    tell_both(problem, inner, outer)
    rows = values_of_all(dist.get_process_group_ranks(group_or_world(inner)), outer)
    columns = values_of_all(dist.get_process_group_ranks(outer), inner)
    tell_both(problem_with_grid(rows, columns), inner, outer)
    return rows


def check_member(group: Any) -> None:
    """ValueError unless this rank is in it."""
    rank_and_size(group)


def problem_with_grid(rows: list[list[int]], columns: list[list[int]]) -> str | None:
    """What is wrong with the row of each rank of a column, and the other way round."""
    ranks = sorted(rank for row in rows for rank in row)
    across = [list(column) for column in zip(*rows, strict=False)]
    if len(set(ranks)) == len(ranks) and across == columns:
        return None
    return (
        f"process_group {rows} and replicate_group {columns} are not the rows and "
        "columns of one grid: hybrid_groups(inner_size) makes both"
    )


def tell_both(
    problem_here: str | None, inner: ProcessGroup | None, outer: ProcessGroup
) -> None:
    """ValueError on every rank of both groups if one has a problem.

    The first question is that of a wrapper without replicas: if only some ranks have
    them, all ranks of the row raise, and ask no more.
    """
    asked = {"replicate_group": words_for(outer)}
    problem = problem_of(lambda: check_same("groups", [], inner, asked, problem_here))
    groups = [outer] if problem else [outer, inner]
    for group in groups:
        if problem_of(partial(check_member, group)) is None:
            problem = problem_of(partial(raise_everywhere, ValueError, problem, group))
    if problem is not None:
        raise ValueError(problem)


def words_for(group: object) -> str | None:
    """What ranks compare of an outer group, which differs among them."""
    return f"{group.size()} ranks" if isinstance(group, ProcessGroup) else None
