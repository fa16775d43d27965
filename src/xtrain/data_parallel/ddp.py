"""Data parallelism that hides its communication behind backward.

    backward     ... layer 4 | layer 3 | layer 2 | layer 1 | end
    bucket 0         full -> all-reduce ........ done
    bucket 1                       full -> all-reduce ...... wait for both

A hook on each parameter runs when its gradient is complete. When all gradients of a
bucket are, its all-reduce is issued, and backward goes on. At the end of backward the
handles are waited for, so gradients are ready when `backward()` returns.

All ranks must issue the same collectives in the same order, whatever order their
gradients come in: buckets are issued strictly in order.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
2020.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.backward import Reducer, weakly
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.comm.main_grad import accumulate_in_fp32, leave_gradient, unround
from xtrain.comm.work import Work
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import claim
from xtrain.data_parallel.buckets import Bucket, make_buckets
from xtrain.data_parallel.join import JoinState, join
from xtrain.data_parallel.replicas import broadcast_all, check_model


class DistributedDataParallel(nn.Module):
    """Wrap a module so that every backward averages gradients over the ranks.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        process_group: None for all ranks, or for the replicas of a model on a mesh.
        bucket_cap_mb: size of a bucket in MiB.
        broadcast_buffers: rank 0's go to all before each synchronised forward.
        find_unused_parameters: accept parameters that take no part in a step on some
            ranks (their gradient counts as zero there) or on any (it stays as it is).
            Without it such a step raises on every rank.
        gradient_reduction: "average" (as torch does, the default) or "sum" (the default
            of a model on a mesh).
        collectives: whose all-reduce: torch's (TORCH) or one of lc1 (RING, DIRECT).
        fp32_gradients: add up the gradients of 16-bit parameters in fp32, here and over
            the ranks; see `xtrain.comm.main_grad`. On unless False.
        device: "meta" for a module there, by its shapes, as a virtual cluster runs it.

    Each rank sends 2(N-1)/N of the gradients a step. `state_dict` is the bare module's.
    ValueError on every rank if one rank's model or arguments are wrong or differ.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_reduction: str | None = None,
        collectives: Collectives = TORCH,
        fp32_gradients: bool | None = None,
        device: str | None = None,
    ):
        super().__init__()
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "gradient_reduction": over.reduction,
            "collectives": collectives.name,
            "fp32_gradients": fp32_gradients,
            "device": device,
        }
        trainable = [p for p in module.parameters() if p.requires_grad]
        check = partial(check_trainable, trainable)
        check_model(module, over, "DistributedDataParallel", options, check)
        claim(trainable, "DistributedDataParallel", axes=over.axes)

        self.module, self.process_group = module, over.group
        self._rank = dist.get_rank(over.group)
        self._size = dist.get_world_size(over.group)
        self._broadcast_buffers = broadcast_buffers
        self._find_unused = find_unused_parameters
        self.gradient_reduction = over.reduction
        self._collectives = collectives
        self._names = {p: name for name, p in module.named_parameters()}
        broadcast_all([*module.parameters(), *module.buffers()], over.group)

        accumulate_in_fp32(trainable, fp32_gradients)
        self._reducer = Reducer(self._all_reduce, at_end=self._end_of_backward)
        self._reducer.buckets = make_buckets(trainable, int(bucket_cap_mb * 2**20))
        self._bucket_of = {p: b for b in self._reducer.buckets for p in b.parameters}
        self._set_active_ranks(self._size, divisor=self._size)
        self._sync = True
        self._is_local = False  # no_sync has left gradients that are not reduced yet
        self._reduced: set[nn.Parameter] = set()  # whose grad is the whole group's
        self._join_state: JoinState | None = None  # inside join()
        for parameter in trainable:
            ready = weakly(self._gradient_ready)
            parameter.register_post_accumulate_grad_hook(ready)
            undo = partial(weakly(self._undo_previous_sum), parameter)
            parameter.register_hook(undo)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sync and self._join_state is None:
            self._synchronise_buffers()
        elif self._sync and torch.is_grad_enabled():
            self._begin_step_of_join()
        return self.module(*args, **kwargs)

    def _set_active_ranks(self, active: int, divisor: int) -> None:
        # Gradients are divided before they are summed, as torch does.
        average = self.gradient_reduction == "average"
        self._active, self._divisor = active, divisor if average else 1

    def _synchronise_buffers(self, source_rank: int = 0) -> None:
        if self._broadcast_buffers and self.training:
            broadcast_all(list(self.module.buffers()), self.process_group, source_rank)

    def join(
        self, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which ranks may have different numbers of batches."""
        return join(self, divide_by_initial_world_size)

    def _begin_step_of_join(self) -> None:
        if self._join_state is not None:
            self._join_state.begin_step()
            self._synchronise_buffers(self._join_state.source_rank)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up gradients on each rank and send nothing.

        The first backward outside sends the accumulated sums; `reduce_gradients` does
        it without one. Buffers stay each rank's own inside.
        """
        before, self._sync = self._sync, False
        self._is_local = True
        try:
            yield
        finally:
            self._sync = before

    def reduce_gradients(self) -> None:
        """Reduce what `no_sync` has accumulated, on every rank; otherwise do nothing.

        A parameter that got no gradient in any of its backwards is treated as one that
        got none in a backward outside: see find_unused_parameters.
        """
        if self._is_local:
            self._begin_step_of_join()
            self._finish([p for p in self._bucket_of if p.grad is None])

    def _undo_previous_sum(self, parameter: nn.Parameter, *_: Tensor) -> None:
        # What stays in `grad` for another step comes back from every active rank: a sum
        # N times; inside join an average fewer than N times.
        if parameter in self._reduced and (grad := unround(parameter)) is not None:
            if self._active != self._divisor:
                grad.div_(self._active / self._divisor)
            self._reduced.discard(parameter)

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        self._reduced.discard(parameter)
        if not self._sync:
            self._is_local = True
            return
        self._reducer.enter_backward()
        self._bucket_of[parameter].take(parameter, self._divisor)
        self._reducer.issue_complete()

    def _all_reduce(self, bucket: Bucket) -> Work:
        return self._collectives.all_reduce(bucket.flat, group=self.process_group)

    def _end_of_backward(self) -> None:
        self._finish([p for b in self._reducer.buckets for p in b.waiting])

    def _finish(self, unused: list[nn.Parameter], shadow: bool = False) -> None:
        """Send what is left, `unused` as zeros, and wait for all buckets."""
        if self._join_state is not None:
            self._join_state.in_step = False
        for parameter in [p for b in self._reducer.buckets for p in b.waiting]:
            self._undo_previous_sum(parameter)
            self._bucket_of[parameter].take(parameter, self._divisor)
        # The spare element tells every rank how many parameters went unused, on any. It
        # is zero unless some did here, and then its bucket, the last, has not left yet.
        flag = self._reducer.buckets[-1].spare
        if unused:
            flag.fill_(len(unused))
        self._reducer.finish()
        self._is_local = False
        anywhere_unused = flag.item() > 0
        flag.zero_()
        if anywhere_unused and not self._find_unused:
            raise RuntimeError(unused_message([self._names[p] for p in unused]))
        used: Iterable[nn.Parameter] = self._bucket_of
        if anywhere_unused:
            used = self._used_anywhere(list(used) if shadow else unused)
        for parameter in {*used, *(p for p in self._bucket_of if p.grad is not None)}:
            leave_gradient(parameter, self._bucket_of[parameter].views[parameter])
        self._reduced.update(used)

    def _used_anywhere(self, unused: list[nn.Parameter]) -> list[nn.Parameter]:
        missing = set(unused)  # tensors compare element by element, sets by identity
        here = [float(p not in missing) for p in self._bucket_of]
        used = torch.tensor(here, device=self._reducer.buckets[0].flat.device)
        dist.all_reduce(used, group=self.process_group)
        ranks = dict(zip(self._bucket_of, used.tolist(), strict=True))
        return [p for p in ranks if ranks[p]]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load what `state_dict` gave here, or torch's wrapper, with "module."."""
        own = self.module.state_dict().keys()
        if not any(name in own for name in state_dict):
            state_dict = {n.removeprefix("module."): t for n, t in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def check_trainable(trainable: list[nn.Parameter]) -> None:
    if not trainable:
        raise ValueError("the module has no parameter that requires a gradient")


def unused_message(names: list[str]) -> str:
    return (
        "parameters that got no gradient in this backward: "
        f"{names or 'none here, some on another rank'}. Let them take part in the "
        "loss, freeze them, or pass find_unused_parameters=True"
    )
