"""Agreement of all ranks: a mistake on one rank is an error on every rank.

    rank 0   options, tensors, what is wrong here --+
    rank 1   options, tensors, what is wrong here --+--> exchange --> the same verdict

A rank that raised alone would leave the others waiting in the next collective, and
ranks with other options would train on and be wrong. One exchange of a few bytes makes
an error on every rank of both. Wrappers ask `check_same` when they are built;
`raise_everywhere` and `raising_everywhere` serve what may fail on one rank later.

As long as nothing is wrong, ranks exchange three numbers by an all-reduce: each gives a
digest and the negative of it, and the largest equals the smallest if all agree. Words
are gathered only for the error: with N ranks that would be N times N of them each time.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world, message_device, rank_and_size

Named = Iterable[tuple[str, Tensor]]

LIMIT = 200
"""Characters of a message on any number of ranks, or of each of its lines."""
MOST_RUNS = 6  # of ranks that are named
FOLDERS = re.compile(r"/\S*/")
WITH_RANKS = re.compile(r"ranks? \d[-\d, ]*( and \d+ more)?: ")


def check_same(
    what: str,
    tensors: Named,
    group: ProcessGroup | None,
    options: Mapping[str, object] | None = None,
    problem: str | None = None,
) -> None:
    """ValueError on every rank unless all have the same options and the same tensors.

    Args:
        what: the name of all tensors together, for the message.
        tensors: compared by name, shape, dtype and whether they are trained.
        options: compared by what they print as.
        problem: what is wrong on this rank alone.
    """
    chosen = {name: as_text(value) for name, value in (options or {}).items()}
    mine = problem, chosen, {name: describe(tensor) for name, tensor in tensors}
    number = digest(mine)
    wrong, most, least = largest_of([problem is not None, number, -number], group)
    if not wrong and most == -least:
        return
    theirs = values_of_all(mine, group)
    problems = [problem for problem, _, _ in theirs]
    if any(problems):
        raise ValueError(with_ranks(problems, global_ranks(group)))
    names = global_ranks(group)
    for rank, (_, *both) in enumerate(theirs):
        for first, other, kind in zip(theirs[0][1:], both, ("", what), strict=True):
            differing = [n for n in {**first, **other} if first.get(n) != other.get(n)]
            if differing:
                name = differing[0]
                text = (
                    f"ranks {names[0]} and {names[rank]} have different "
                    f"{kind or name}: {name} is {first.get(name, 'missing')} and "
                    f"{other.get(name, 'missing')}"
                )
                raise ValueError(shortened(text))


def raise_everywhere(
    error: type[Exception], problem: str | None, group: ProcessGroup | None
) -> None:
    """Raise on every rank when one has a problem; a rank that raised alone would leave
    the others waiting for it. The error names the ranks that have it, unless all do."""
    if any(largest_of([problem is not None], group)):
        raise error(with_ranks(values_of_all(problem, group), global_ranks(group)))


@contextmanager
def raising_everywhere(
    *errors: type[Exception], group: ProcessGroup | None, what: str = ""
) -> Iterator[None]:
    """What one rank's block raises, every rank raises at the end of its own.

    Args:
        errors: what may be raised, the most general last; that is also what anything
            else becomes. If ranks fail in different ways, the most general is raised.
        what: the error begins with it.
    """
    kind, problem, cause = -1, None, None
    try:
        yield
    except Exception as error:  # of any kind: all ranks must raise
        fits = [n for n, known in enumerate(errors) if isinstance(error, known)]
        kind, cause = (fits or [len(errors) - 1])[0], error
        expected = isinstance(error, (*errors, OSError))
        problem = text_of(error)
        problem = problem if expected else f"{type(error).__name__}: {problem}"
    (kind,) = largest_of([kind], group)
    if kind >= 0:
        text = with_ranks(values_of_all(problem, group), global_ranks(group))
        raise errors[kind](what + text) from cause


def with_ranks(
    problems: Sequence[str | None], ranks: Sequence[int] | None = None
) -> str:
    """Each problem once, after the ranks that have it unless all have the same.

    A problem that begins with ranks stands as it is: they have been named within
    another group. Of many problems the first ones are given, and the number of others.

    Args:
        ranks: how they are named: their global ranks.
    """
    found: dict[str, list[int]] = {}
    for rank, problem in zip(ranks or range(len(problems)), problems, strict=True):
        if problem is not None:
            found.setdefault(problem, []).append(rank)
    if list(map(len, found.values())) == [len(problems)]:
        return shortened(next(iter(found)))
    texts = [
        problem if WITH_RANKS.match(problem) else f"{named_ranks(who)}: {problem}"
        for problem, who in found.items()
    ]
    text, room = texts[0], LIMIT - len("; 1000000 more")
    for n, problem in enumerate(texts[1:], 1):
        if len(f"{text}; {problem}") > room:
            return f"{shortened(text, room)}; {len(texts) - n} more"
        text += f"; {problem}"
    return shortened(text)


def named_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2", "ranks 0-3, 8": three in a row are a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    ]
    more = sum(map(len, runs[MOST_RUNS:]))
    several = "s" * (len(ranks) > 1)
    and_more = f" and {more} more" if more else ""
    return f"rank{several} {', '.join(parts[:MOST_RUNS])}{and_more}"


def shortened(text: str, limit: int = LIMIT) -> str:
    """Its beginning and its end, where the rule stands, if it is longer than that.

    Of several lines, a list of tensors, each one is. A path's folders do not count.
    """
    if "\n" in text:
        return "\n".join(shortened(line, limit) for line in text.split("\n"))
    limit += sum(map(len, FOLDERS.findall(text)))
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 5].rstrip()} ... {text[-tail:].lstrip()}"


def global_ranks(group: ProcessGroup | None) -> list[int]:
    """The global ranks of a group."""
    if is_alone(group):
        return [0]
    return dist.get_process_group_ranks(group_or_world(group))


def text_of(error: BaseException) -> str:
    """What an error prints as, also if that fails."""
    try:
        return str(error)
    except Exception as broken:  # all ranks must raise all the same
        return f"an error whose text raises {type(broken).__name__}"


def is_alone(group: ProcessGroup | None) -> bool:
    """Whether this is a process that has no group, and was started without others."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    return group is None and not dist.is_initialized() and started == 1


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """`rank_and_size`; of a process that is alone, 0 and 1."""
    return (0, 1) if is_alone(group) else rank_and_size(group)


def largest_of(numbers: Sequence[int], group: ProcessGroup | None) -> list[int]:
    """The largest of all ranks' numbers, each for itself, on every rank."""
    if is_alone(group):
        return [int(number) for number in numbers]
    rank_and_size(group)  # ValueError outside of the group
    device = message_device(group)
    largest = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def digest(what: object) -> int:
    """A number of 48 bits for what something prints as."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:12], 16)


def values_of_all(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Every rank's value, any Python object, on every rank."""
    if is_alone(group):
        return [value]
    values: list[Any] = [None] * rank_and_size(group)[1]
    dist.all_gather_object(values, value, group=group)
    return values


def value_of_rank_0(value: Any, group: ProcessGroup | None) -> Any:
    """Rank 0's value, any Python object, on every rank."""
    if is_alone(group):
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype}{' trained' * tensor.requires_grad}"


def as_text(value: object) -> str:
    """A value as all ranks print it: no addresses, functions and classes by name."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    name = getattr(value, "__qualname__", None)
    return name or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def problem_of(*checks: Callable[[], None]) -> str | None:
    """The message of the first check that fails, for `check_same`.

    Any error counts: a rank that raised alone would leave the others waiting.
    """
    for check in checks:
        try:
            check()
        except ValueError as error:
            return str(error)
        except Exception as error:  # of any kind: all ranks must raise
            return f"{type(error).__name__}: {error}"
    return None
