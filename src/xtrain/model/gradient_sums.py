"""What `sync_gradients` sums over a mesh axis, under each wrapper over another axis.

no wrapper, DDP    the parameter's own gradient, whole
FSDP               the parameter's own gradient, a shard
ZeRO 1 and 2       this rank's piece of it, which the optimizer has
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import sum_among
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.main_grad import LOW, leave_gradient, unround
from xtrain.comm.mesh import REPLICA_AXES
from xtrain.comm.wrapper_rules import owner_of, pieces_of, summed_over

SHARDS = {
    "ZeroOptimizer": "optimizer.clip_grad_norm_(max_norm, model)",
    "FullyShardedDataParallel": "fsdp.clip_grad_norm_(max_norm)",
}
"""Wrappers that shard gradients, and how each of them clips."""
CLIPS = SHARDS | {
    "Muon": "clip_sharded_grad_norm_ of what muon.reduce_gradients() leaves",
}
"""Those whose gradients are not the parameters' own when a step is clipped."""


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter], group: ProcessGroup | None
) -> None:
    """Of each trained parameter, in order; zeros where it has none.

    Gradients of 16 bits are sent and summed in fp32.
    """
    taken = Taken(parameters)
    works = [TORCH.all_reduce(t, group=group) for t in taken.totals if t.numel()]
    for work in works:
        work.wait()
    taken.put_back()


@torch.no_grad()
def sum_in_one_bucket(
    parameters: Iterable[nn.Parameter], members: range, group: ProcessGroup
) -> None:
    """The same of small gradients, among some ranks of the group, in one message."""
    taken = Taken(parameters)
    for dtype in dict.fromkeys(total.dtype for total in taken.totals):
        totals = [total for total in taken.totals if total.dtype == dtype]
        bucket = torch.cat([total.flatten() for total in totals])
        if len(members) == group.size():
            TORCH.all_reduce(bucket, group=group).wait()
        else:
            bucket = sum_among(bucket, members, group)
        parts = bucket.split([total.numel() for total in totals])
        for total, part in zip(totals, parts, strict=True):
            total.copy_(part.view_as(total))
    taken.put_back()


class Taken:
    """Gradients as they are summed: this rank's part of each, 16 bits in fp32."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        trained = [p for p in parameters if p.requires_grad]
        self.pieces = dict(pieces_of(trained))
        self.gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in trained:
            known = parameter in self.pieces
            own = self.pieces[parameter] if known else unround(parameter)
            if own is None:
                own = parameter.grad = torch.zeros_like(parameter)
            if hasattr(own, "to_local"):  # of torch's fully_shard: a shard, in place
                own = self.pieces[parameter] = own.to_local()
            self.gradients[parameter] = own
        self.totals = [
            own.float() if own.dtype in LOW else own for own in self.gradients.values()
        ]

    def put_back(self) -> None:
        """Leave the totals where the gradients were."""
        held = self.gradients.items()
        for (parameter, own), total in zip(held, self.totals, strict=True):
            if parameter not in self.pieces:
                leave_gradient(parameter, total)
            elif total is not own:
                own.copy_(total)


def check_skips(
    parameters: Iterable[Tensor], axes: Collection[str], skip: Collection[str] | None
) -> None:
    """ValueError unless the `skip` of `sync_gradients` is what wrappers have summed.

    The caller knows of sums by torch's own wrappers, which leave no mark.
    """
    trained = [p for p in parameters if p.requires_grad]
    summed = {
        axis: owner_of(p)
        for p in trained
        for axis in summed_over(p)
        if axis != "tensor"  # by the runner of a pipeline, or by nothing
    }
    skipped = summed if skip is None else skip
    for axis in axes:
        check_skip(trained, axis, skipped)
    owners = [*filter(None, [*summed.values(), *map(owner_of, trained)])]
    if skip is None or not (summed or owners):
        return
    for axis in axes:
        if (axis in skip) != (axis in summed):
            does = "sums" if axis in summed else "does not sum"
            owner = summed.get(axis) or (owners or ["NaiveDataParallel"])[0]
            raise ValueError(
                f"sync_gradients(skip={tuple(skip)!r}), but {owner} {does} over "
                f"{axis!r}: leave skip out, and the wrapper's axes are skipped"
            )


def check_skip(parameters: Iterable[Tensor], axis: str, skip: Collection[str]) -> None:
    """ValueError if a wrapper that shards gradients is over the wrong axis.

    Norms count shards over "data" alone, or over "expert_data" where there are experts.
    """
    claimed = {owner_of(parameter) for parameter in parameters}
    owners = [owner for owner in SHARDS if owner in claimed]
    if owners and (axis in skip) != (axis in REPLICA_AXES):
        owner, over = " and ".join(owners), "data"
        if axis in ("expert", "expert_data"):
            over = "expert_data"
        raise ValueError(
            f"sync_gradients(skip={tuple(skip)!r}) of parameters under {owner}: it "
            f'shards over "{over}", process_group=mesh["{over}"].get_group(), and then '
            f'skip=("{over}",)'
        )
    if axis == "expert" and axis in skip:
        raise ValueError(
            f'sync_gradients(skip={tuple(skip)!r}): no wrapper sums over "expert", '
            "whose ranks hold different experts; give it process_group="
            'mesh["expert_data"].get_group()'
        )


def check_not_sharded(parameters: Iterable[Tensor]) -> None:
    """ValueError for gradients that a wrapper shards: they are clipped by its method.

    The norm of the parameters' own gradients would be that of shards, or zero.
    """
    for owner in map(owner_of, parameters):
        if owner in CLIPS:
            raise ValueError(
                f"{owner} shards the gradients of this model: call {CLIPS[owner]}"
            )
