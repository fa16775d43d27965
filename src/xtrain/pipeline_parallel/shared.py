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
from xtrain.comm.main_grad import gradient_dtype, set_gradient, unround
from xtrain.pipeline_parallel.lost_ranks import exchange_by_peer
from xtrain.pipeline_parallel.stage import PipelineStage

Shared = dict[str, list[nn.Parameter]]


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
        self.held = held
        self._checked = False

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

    @torch.no_grad()
    def sum(self, of_sharded: bool) -> None:
        """Give every holder of a parameter the sum of their gradients; all ranks call.

        What has a gradient nowhere keeps None.

        Args:
            of_sharded: do so with those that ZeRO will cut, else with all others.
        """
        sends: list[tuple[Tensor, int]] = []
        recvs: list[tuple[Tensor, int]] = []
        parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        for name, ranks in self.holders.items():
            if self.rank not in ranks:
                continue
            if (self.held[name][0] in self.sharded) != of_sharded:
                continue
            own = own_sum(self.held[name])
            parts[name] = {
                r: (torch.empty_like(own[0]), torch.empty_like(own[1])) for r in ranks
            }
            parts[name][self.rank] = own
            others = [peer for peer in ranks if peer != self.rank]
            sends += [(tensor, peer) for peer in others for tensor in own]
            recvs += [(part, peer) for peer in others for part in parts[name][peer]]
        exchange_by_peer(sends, recvs, self.group, "the sum of shared gradients")
        for name, by_rank in parts.items():
            in_one_order = [by_rank[rank] for rank in sorted(by_rank)]
            if not any(exists.item() for _, exists in in_one_order):
                continue
            total = torch.stack([part for part, _ in in_one_order]).sum(0)
            for parameter in self.held[name]:
                unround(parameter)
                if parameter.grad is None:
                    set_gradient(parameter, torch.empty_like(total))
                assert parameter.grad is not None
                parameter.grad.copy_(total)


def fingerprint(parameter: Tensor) -> float:
    """A number that is the same for the same numbers in the same order."""
    flat = parameter.detach().flatten().double()
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().item()


def in_fp32(parameter: Tensor) -> str:
    dtype = gradient_dtype(parameter)
    return "" if dtype == parameter.dtype else f" with gradients of {dtype}"


def own_sum(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """The sum of this rank's gradients of one shared parameter, and whether any is."""
    first, dtype = parameters[0], gradient_dtype(parameters[0])
    total = torch.zeros(first.shape, dtype=dtype, device=first.device)
    found = [g for p in parameters if (g := unround(p)) is not None]
    for gradient in found:
        total += gradient
    return total, torch.tensor(bool(found), device=first.device)
