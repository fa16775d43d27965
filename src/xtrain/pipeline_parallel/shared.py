"""Parameters that several stages hold: one parameter, whose gradient is the sum.

    tied embeddings     stage 0's table is the last stage's head
    mirrored schedules  each stage is on two ranks, one for each direction

Every holder ends up with the same sum, to the bit, so the copies never part.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.p2p import exchange_all
from xtrain.pipeline_parallel.stage import PipelineStage

Shared = dict[str, list[nn.Parameter]]


def held_by_name(stages: Sequence[PipelineStage], mirrored: bool) -> Shared:
    """What this rank may share, by the name that all holders know it by."""
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
        group: the ranks of the pipeline.
        sharded: those whose gradients a `ZeroOptimizer` will cut into shards.

    Raises:
        ValueError: on every rank: a name stands for different parameters, or their
            gradients would be summed at different times.
    """

    def __init__(
        self,
        held: Shared,
        group: ProcessGroup | None,
        sharded: Collection[nn.Parameter] = (),
    ):
        self.rank, size = rank_and_size(group)
        self.group = group
        self.sharded = set(sharded)
        mine = {
            name: [
                f"{list(p.shape)} {p.dtype}{' of ZeRO' * (p in self.sharded)}"
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
        self.held = held

    @property
    def exist(self) -> bool:
        """Whether any rank shares anything; the same answer on every rank."""
        return bool(self.holders)

    @torch.no_grad()
    def sum(self, of_sharded: bool) -> None:
        """Give every holder of a parameter the sum of their gradients; all ranks call.

        Args:
            of_sharded: do so with those that ZeRO will cut, else with all others.
        """
        sends: list[tuple[Tensor, int]] = []
        recvs: list[tuple[Tensor, int]] = []
        parts: dict[str, dict[int, Tensor]] = {}
        for name, ranks in self.holders.items():
            if self.rank not in ranks:
                continue
            if (self.held[name][0] in self.sharded) != of_sharded:
                continue
            own = own_sum(self.held[name])
            parts[name] = {r: torch.empty_like(own) for r in ranks if r != self.rank}
            sends += [(own, peer) for peer in parts[name]]
            recvs += [(part, peer) for peer, part in parts[name].items()]
            parts[name][self.rank] = own
        exchange_all(sends, recvs, self.group)
        for name, by_rank in parts.items():
            in_one_order = [by_rank[rank] for rank in sorted(by_rank)]
            total = torch.stack(in_one_order).sum(0)
            for parameter in self.held[name]:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(total)


def own_sum(parameters: list[nn.Parameter]) -> Tensor:
    """The sum of the gradients that this rank has of one shared parameter."""
    total = torch.zeros_like(parameters[0], memory_format=torch.contiguous_format)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad
    return total
