"""One case of the support matrix: trained on ranks, and in one process.

ranks         wrapper + features, every rank its batches  ->  weights, or the error
one process   no wrapper, all batches, float64            ->  weights
"""

import gc
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.zero import LossScaler

from .cases import Case
from .cut import CutToy, cut, groups_of, whole_weights
from .features import prepare
from .pipeline import PipelineRun
from .setup import STEPS, Setup
from .toy import Toy, batch, loss_of, make
from .wrappers import wrap

SUBGROUPS = [[0, 3], [1, 2]]
Groups = tuple[ProcessGroup | None, ProcessGroup | None]


def train(cases: list[Case]) -> list[dict[str, Tensor] | str]:
    """On every rank: the weights after the last step of each case, or its error.

    Cases of one shape share their groups; after an error the next ones are new.
    """
    results: list[dict[str, Tensor] | str] = []
    made: dict[tuple[int, int], Groups] = {}
    for case in cases:
        setup = prepare(case)
        stream = stream_of(setup, dist.get_rank())
        shape = setup.tensor * setup.pipeline, setup.subgroups
        if shape not in made:
            made[shape] = groups_for(setup, stream)
        group, tensor = made[shape]
        try:
            if setup.pipeline > 1:
                assert group is not None and tensor is not None
                results.append(PipelineRun(setup, group, tensor).weights())
            else:
                results.append(Run(setup, group, stream, tensor).weights())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
            destroy(made.pop(shape))
    for groups in made.values():
        destroy(groups)
    made.clear()
    group = tensor = None
    gc.collect()  # a group's threads wake all the time, until nothing refers to it
    return results


def groups_for(setup: Setup, stream: int) -> Groups:
    """A rank's data group, and that of those who hold a model together in `tensor`."""
    group, tensor = None, None
    if setup.tensor * setup.pipeline > 1:
        group, tensor = groups_of(setup.ranks, setup.tensor * setup.pipeline)
    if setup.subgroups > 1:
        group = [dist.new_group(members) for members in SUBGROUPS][stream]
    return group, tensor


def destroy(groups: Groups) -> None:
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


def stream_of(setup: Setup, rank: int) -> int:
    """Which batches a rank has: those of its group."""
    if setup.subgroups == 1:
        return 0
    return next(n for n, members in enumerate(SUBGROUPS) if rank in members)


class Run:
    """A case on one rank."""

    def __init__(
        self,
        setup: Setup,
        group: ProcessGroup | None,
        stream: int,
        tensor: ProcessGroup | None,
    ):
        self.setup, self.stream, self.tensor = setup, stream, tensor
        self.rank = dist.get_rank(group)
        # Every rank begins elsewhere: a missing broadcast would show.
        seed = 100 * stream + self.rank
        self.module = make(seed, setup.dtype, **setup.model)
        if tensor is not None:
            everyone = dist.group.WORLD
            self.module = cut(self.module, setup.sequence_parallel, tensor, everyone)
        self.scaler = make_scaler(setup, group if tensor is None else dist.group.WORLD)
        ours = self.scaler if isinstance(self.scaler, LossScaler) else None
        self.wrapped = wrap(self.module, setup, group, ours)

    def weights(self) -> dict[str, Tensor]:
        """Train, then give whole tensors by name."""
        model: Any = self.wrapped.model
        with model.join() if self.setup.uneven else nullcontext():
            for step in range(self.setup.steps(self.rank)):
                self.accumulate(step)
                self.update()
        weights = self.wrapped.weights()
        if isinstance(self.module, CutToy):
            weights = whole_weights(self.module, weights)
        return {name.removeprefix("module."): t.clone() for name, t in weights.items()}

    def accumulate(self, step: int) -> None:
        """The forwards and backwards of a step."""
        setup, last = self.setup, self.setup.micro_batches - 1
        toy = next(m for m in self.wrapped.model.modules() if isinstance(m, Toy))
        toy.overflow = bool(setup.scaler) and step == 0 and self.is_last()
        toy.leave_out(setup.leave_out and self.rank % 2 == 1)
        waiting: list[Tensor] = []  # losses, for their backwards
        for micro in range(setup.micro_batches + setup.interleaved):
            if micro <= last:
                with self.communication(micro < last):
                    waiting.append(self.forward(step, micro))
            if micro >= setup.interleaved:
                with self.communication(micro - setup.interleaved < last):
                    waiting.pop(0).backward()
        if setup.by_hand or self.wrapped.naive:
            self.wrapped.reduction.reduce_gradients()

    def is_last(self) -> bool:
        """One rank of all, also of those that hold a model together."""
        last = self.rank == self.setup.size - 1
        return last and (self.tensor is None or self.tensor.rank() > 0)

    def communication(self, more: bool) -> AbstractContextManager[None]:
        quiet = self.setup.by_hand or (self.setup.quiet and more)
        return self.wrapped.reduction.no_sync() if quiet else nullcontext()

    def forward(self, step: int, micro: int) -> Tensor:
        tokens = batch(step, micro, self.rank, self.stream, self.setup.length)
        low = self.setup.autocast
        with torch.autocast(tokens.device.type, low, enabled=low is not None):
            loss = loss_of(self.wrapped.model(tokens), tokens)
        if isinstance(self.scaler, LossScaler):
            return self.scaler.scale_loss(loss)
        return self.scaler.scale(loss) if self.scaler is not None else loss

    def update(self) -> None:
        """Unscale, clip, step: in the order that each scaler asks for."""
        scaler, optimizer = self.scaler, self.wrapped.optimizer
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.unscale_(optimizer)
            self.clip()
            scaler.step(optimizer)
            scaler.update()
        elif scaler is None or not self.wrapped.sharded:
            # MixedPrecisionOptimizer unscales in its step
            self.clip(1.0 if scaler is None else scaler.scale)
            optimizer.step()
        else:
            finite = scaler.unscale(self.wrapped.gradients())
            scaler.update(finite)
            if finite:
                self.clip()
                optimizer.step()
        optimizer.zero_grad()

    def clip(self, scale: float = 1.0) -> None:
        if self.setup.max_norm is not None:
            self.wrapped.clip(self.setup.max_norm * scale)


def make_scaler(
    setup: Setup, group: ProcessGroup | None
) -> LossScaler | torch.amp.GradScaler | None:
    if setup.scaler == "GradScaler":
        device = torch.get_default_device().type
        return torch.amp.GradScaler(device, init_scale=2.0**10)
    if setup.scaler == "LossScaler":
        return LossScaler(init_scale=2.0**10, process_group=group)
    return None


def reference(case: Case, stream: int = 0) -> tuple[dict[str, Tensor], ...]:
    """The same training in one process without a wrapper: weights before and after."""
    setup = prepare(case)
    model = make(100 * stream, torch.float64, **setup.model)
    before = copies(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = setup.optimizer(trained)
    for step in range(STEPS):
        for rank in range(setup.size):
            if step < setup.steps(rank):
                model.leave_out(setup.leave_out and rank % 2 == 1)
                for micro in range(setup.micro_batches):
                    tokens = batch(step, micro, rank, stream, setup.length)
                    loss = loss_of(model(tokens), tokens)
                    (loss / (setup.size if setup.averages else 1)).backward()
        if setup.max_norm is not None:
            nn.utils.clip_grad_norm_(trained, setup.max_norm)
        if not (setup.scaler and step == 0):  # an overflow skips the first
            optimizer.step()
        optimizer.zero_grad()
    return before, copies(model)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def error_of(
    found: dict[str, Tensor], before: dict[str, Tensor], after: dict[str, Tensor]
) -> float:
    """The largest distance of a tensor from the reference, over how far that moved."""
    if found.keys() != after.keys():
        return math.inf
    errors = [
        (found[name].double() - after[name]).norm().item()
        / max((after[name] - before[name]).norm().item(), 0.01)
        for name in after
    ]
    return max((error if error == error else math.inf) for error in errors)
