"""The sum of gradients that several ranks have, in half of the memory of the gradients.

    parameters     0        1        2        3
    added on       rank 0   rank 1   rank 0   rank 1     of two holders

    there          rank 1 --dW--> rank 0          into a buffer, and added to its own
    and back       rank 0 --sum-> rank 1          into the gradient itself

Each rank sends as much as in a ring, 2 (n - 1) / n of all gradients, and holds buffers
for the parameters that it adds up.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.main_grad import gradient_dtype, set_gradient, unround
from xtrain.pipeline_parallel.lost_ranks import (
    exchange_by_peer,
    post_by_peer,
    wait_by_peer,
)

Shared = dict[str, list[nn.Parameter]]
"""A rank's parameters, by the name that all holders give them."""
AT = "the sum of shared gradients"
TAG = 1  # beside activations of the same two ranks


class Exchange:
    """Sums under way: made when the gradients are there, finished later.

    Args:
        held: this rank's, of which each name is held by other ranks, too.
        holders: the ranks of `group` that hold each, in the same order on all of them.
    """

    @torch.no_grad()
    def __init__(
        self,
        held: Shared,
        holders: dict[str, list[int]],
        rank: int,
        group: ProcessGroup | None,
    ):
        self.held, self.holders, self.rank, self.group = held, holders, rank, group
        self.owners = {
            name: ranks[n % len(ranks)]
            for n, (name, ranks) in enumerate(holders.items())
        }
        self.totals = {name: own_sum(parameters) for name, parameters in held.items()}
        exist = {n: any(p.grad is not None for p in held[n]) for n in held}
        self.exist = {rank: exist}
        self.flags: dict[int, Tensor] = {}
        sends, recvs = [], []
        for peer in sorted({r for ranks in holders.values() for r in ranks} - {rank}):
            flags = torch.tensor([exist[n] for n in self._common(peer)])
            flags = flags.to(next(iter(self.totals.values())).device, torch.uint8)
            self.flags[peer] = torch.empty_like(flags)
            sends.append((flags, peer))
            recvs.append((self.flags[peer], peer))
        self.parts: dict[str, list[Tensor]] = {}
        for name, owner in self.owners.items():
            if owner != rank:
                sends.append((self.totals[name], owner))
                continue
            for peer in self._others(name):
                part = torch.empty_like(self.totals[name])
                self.parts.setdefault(name, []).append(part)
                recvs.append((part, peer))
        self.posted = post_by_peer(sends, recvs, group, AT, TAG)

    @torch.no_grad()
    def finish(self) -> None:
        """Add up, send the sums back, and leave them as the gradients."""
        wait_by_peer(self.posted, self.group, AT)
        sends, recvs = [], []
        for name, owner in self.owners.items():
            total = self.totals[name]
            if owner != self.rank:
                recvs.append((total, owner))
                continue
            for part in self.parts.pop(name, ()):
                total += part
            sends += [(total, peer) for peer in self._others(name)]
        exchange_by_peer(sends, recvs, self.group, AT, TAG)
        anywhere = {name for name, there in self.exist[self.rank].items() if there}
        for peer, flags in self.flags.items():
            there = zip(self._common(peer), flags.tolist(), strict=True)
            anywhere |= {name for name, one in there if one}
        for name in anywhere:
            leave(self.held[name], self.totals[name])

    def _common(self, peer: int) -> list[str]:
        return [name for name, ranks in self.holders.items() if peer in ranks]

    def _others(self, name: str) -> list[int]:
        return [peer for peer in self.holders[name] if peer != self.rank]


def own_sum(parameters: list[nn.Parameter]) -> Tensor:
    """The sum of this rank's gradients of one shared parameter: its only one itself."""
    first, dtype = local(parameters[0]), gradient_dtype(parameters[0])
    found = [local(g) for p in parameters if (g := unround(p)) is not None]
    if len(found) == 1 and found[0].is_contiguous() and found[0].dtype == dtype:
        return found[0].detach().as_subclass(Tensor)
    total = torch.zeros(first.shape, dtype=dtype, device=first.device)
    for gradient in found:
        total += gradient
    return total


def leave(parameters: list[nn.Parameter], total: Tensor) -> None:
    """Let the total be the gradient of each."""
    for parameter in parameters:
        if parameter.grad is None:
            is_shard = local(parameter) is not parameter
            set_gradient(parameter, torch.empty_like(parameter if is_shard else total))
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if gradient.data_ptr() != total.data_ptr():
            gradient.copy_(total)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of what `fully_shard` has cut; others as they are."""
    to_local: Any = getattr(tensor, "to_local", None)  # DTensor is slow to import
    return tensor if to_local is None else to_local()
