"""Parameters that several stages hold: one parameter, whose gradient is the sum.

    tied embeddings     stage 0's table is the last stage's head
    mirrored schedules  each stage is on two ranks, one for each direction

Every holder ends up with the same sum, to the bit, so the copies never part.

    stage 1's backwards are over     its gradients go to where they are added
    stage 0's backwards ...          meanwhile
    end of the step                  sums go back; then stage 0's, a bucket at a time
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.main_grad import gradient_dtype
from xtrain.pipeline_parallel.shared_exchange import Exchange, Shared, local
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.schedules import Schedule, with_reductions
from xtrain.schedules.action import REDUCE

BUCKET = 25 * 2**20
"""Bytes of gradients whose sums are under way together at the end of a step."""


def held_by_name(stages: Sequence[PipelineStage], mirrored: bool) -> Shared:
    """What this rank may share, by the name that all holders give it."""
    held: Shared = {}
    for stage in stages:
        named = {id(p): name for name, p in stage.shared.items()}
        for name, parameter in stage.named_parameters():
            own = f"stage {stage.index}, {name}" if mirrored else None
            if key := named.get(id(parameter), own):
                known = held.setdefault(key, [])
                if all(parameter is not other for other in known):
                    known.append(parameter)
    return held


class SharedGradients:
    """Sums the gradients of shared parameters, when their backwards are over.

    Args:
        held: this rank's, by name.
        sharded: those whose gradients a `ZeroOptimizer` will cut into shards.
        early: see `first_stage`.

    Raises:
        ValueError: on every rank: a name stands for different parameters, or their
            gradients would be summed at different times.
    """

    def __init__(
        self,
        held: Shared,
        group: ProcessGroup | None,
        sharded: Collection[nn.Parameter] = (),
        early: int | None = None,
    ):
        self.rank, size = rank_and_size(group)
        self.group = group
        self.sharded = set(sharded)
        mine = {
            name: [
                f"{list(p.shape)} {p.dtype}{in_fp32(p)}"
                f"{' of ZeRO' * (p in self.sharded)}"
                for p in parameters
            ]
            for name, parameters in held.items()
        }
        every: list[dict[str, list[str]]] = [{}] * size
        dist.all_gather_object(every, mine, group=group)
        self.holders = {
            name: [rank for rank, theirs in enumerate(every) if name in theirs]
            for name in sorted(set().union(*every))
        }
        for name, ranks in self.holders.items():
            if len(kinds := {kind for r in ranks for kind in every[r][name]}) > 1:
                raise ValueError(
                    f"shared parameter {name!r} is {' and '.join(sorted(kinds))} on "
                    f"ranks {ranks}: its holders must have one shape and dtype, and "
                    "all be ZeRO's or none"
                )
        self.held, self.early = held, early
        self._checked = False
        self._begun: Exchange | None = None

    @property
    def exist(self) -> bool:
        """Whether any rank shares anything; the same answer on every rank."""
        return bool(self.holders)

    def check_equal(self) -> None:
        """ValueError on every rank unless all copies begin with the same numbers.

        Asked once: from then on the same gradients keep them so.
        """
        if self._checked or not self.holders:
            return
        self._checked = True
        mine = {
            name: [fingerprint(parameter) for parameter in parameters]
            for name, parameters in self.held.items()
        }
        every: list[dict[str, list[float]]] = [{}] * rank_and_size(self.group)[1]
        dist.all_gather_object(every, mine, group=self.group)
        for name, ranks in self.holders.items():
            if len({number for r in ranks for number in every[r][name]}) > 1:
                raise ValueError(
                    f"shared parameter {name!r} differs between its holders, on ranks "
                    f"{ranks}: copies must begin with the same numbers"
                )

    def begin(self, stage: int) -> None:
        """Send a mirrored stage's gradients to where they are added; `sum` ends that.

        Its last gradient is there, and other stages' backwards can go on meanwhile. Of
        a pair of ranks only the stage that both have first: messages have one order.
        """
        if stage == self.early and self._begun is None:
            names = [n for n in self.holders if n in self.held and is_of(stage, n)]
            self._begun = self._exchange(names)

    def sum(self, of_sharded: bool) -> None:
        """Give every holder of a parameter the sum of their gradients; all ranks call.

        What has a gradient nowhere keeps None. So many bytes at a time are in flight.

        Args:
            of_sharded: do so with those that ZeRO will cut, else with all others.
        """
        own = [
            name
            for name in self.holders
            if name in self.held and (self.held[name][0] in self.sharded) == of_sharded
        ]
        if self.early is not None and any(is_of(self.early, name) for name in own):
            self.begin(self.early)
            assert self._begun is not None
            self._begun.finish()
            own = [name for name in own if not is_of(self.early, name)]
            self._begun = None
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for name in own:
            by_holders.setdefault(tuple(self.holders[name]), []).append(name)
        for names in by_holders.values():
            for bucket in self._buckets(names):
                self._exchange(bucket).finish()

    def reset(self) -> None:
        """A step begins: forget the sums of one that failed."""
        self._begun = None

    def _buckets(self, names: list[str]) -> list[list[str]]:
        """The names in order, so many bytes of gradients together."""
        found: list[list[str]] = [[]]
        size = 0
        for name in names:
            first = local(self.held[name][0])
            nbytes = first.numel() * gradient_dtype(first).itemsize
            if size and size + nbytes > BUCKET:
                found.append([])
                size = 0
            found[-1].append(name)
            size += nbytes
        return found

    def _exchange(self, names: list[str]) -> Exchange:
        held = {name: self.held[name] for name in names}
        holders = {name: self.holders[name] for name in names}
        return Exchange(held, holders, self.rank, self.group)


def is_of(stage: int, name: str) -> bool:
    """Whether a name of `held_by_name` is of a mirrored stage."""
    return name.startswith(f"stage {stage}, ")


def first_stage(schedule: Schedule, rank: int) -> int | None:
    """The mirrored stage that all its holders, `rank` among them, have done first."""
    if schedule.placement != "mirror":
        return None
    orders = with_reductions(schedule).actions
    first = [next(a.stage for a in order if a.kind == REDUCE) for order in orders]
    others = [r for r in range(schedule.ranks) if first[rank] in schedule.stages_of(r)]
    agreed = len(others) > 1 and {first[r] for r in others} == {first[rank]}
    return first[rank] if agreed else None


def fingerprint(parameter: Tensor) -> float:
    """A number that is the same for the same numbers in the same order."""
    flat = local(parameter.detach()).flatten().double()
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().item()


def in_fp32(parameter: Tensor) -> str:
    dtype = gradient_dtype(parameter)
    return "" if dtype == parameter.dtype else f" with gradients of {dtype}"
