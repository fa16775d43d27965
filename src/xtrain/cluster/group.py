# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A process group of a virtual cluster: torch's calls in, messages and moves out."""

from collections.abc import Callable, Sequence
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.backends.arguments import check_fits
from xtrain.backends.calls import CollectiveCall, call_site, reduce_op, shape_and_dtype
from xtrain.backends.named_group import NamedGroup
from xtrain.backends.observers import OwnDispatch, has_own_dispatch
from xtrain.backends.operators import as_operator
from xtrain.backends.torch_calls import TorchCalls
from xtrain.backends.works import Finished
from xtrain.cluster.collectives import CollectiveCalls, CollectiveWork
from xtrain.cluster.compute import unseen
from xtrain.cluster.messages import RECV, SEND, Mailbox, PostedMessage
from xtrain.cluster.moves import Moves, Part
from xtrain.cluster.scheduler import Scheduler
from xtrain.cluster.symmetry import in_group
from xtrain.cluster.works import SeveralWorks, VirtualWork

NAME = "xtrain-virtual"


class Members:
    """What the ranks of one group share: their messages and collectives."""

    def __init__(self, scheduler: Scheduler, network: Any, ranks: list[int], name: str):
        self.ranks, self.name = ranks, name
        self.stand_ins = in_group(ranks, scheduler.stand_ins)
        self.running = len(set(self.stand_ins))
        self.mailbox = Mailbox(scheduler, network, ranks, self.stand_ins)
        self.collectives = CollectiveCalls(scheduler, network, self)
        self._whole = len(ranks) == len(scheduler.stand_ins)

    def in_words(self) -> str:
        """For messages, after a call: the group where it is not the default one."""
        if self._whole:
            return ""
        few = self.ranks if len(self.ranks) <= 8 else [*self.ranks[:6], "..."]
        return f" in group {', '.join(map(str, few))}"


class VirtualGroup(TorchCalls, NamedGroup):
    """One rank's end of a group."""

    _transport = Moves()

    def __init__(self, rank: int, members: Members, scheduler: Scheduler, checks: Any):
        super().__init__(NAME, rank, len(members.ranks))
        self.ranks, self._members = members.ranks, members
        self._scheduler, self._checks = scheduler, checks
        self._calls = 0
        self._closed = False
        self._thread = get_ident()

    # torch asks a backend for its devices; tensors on "meta" have shapes and no data
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("meta")]

    def _get_backend(self, device: torch.device) -> "VirtualGroup":
        if torch.device(device).type not in ("cpu", "meta"):
            raise RuntimeError(f"{NAME} has no backend for device type {device}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        self._closed = True

    abort = shutdown

    def set_timeout(self, timeout: Any) -> None:
        """Kept for who asks; a wait that cannot end is a deadlock, found at once."""
        self.options = SimpleNamespace(_timeout=timeout)

    _set_default_timeout = set_timeout

    def _global_rank(self, rank: int) -> int:
        return self.ranks[rank]

    # -- messages ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        (tensor,) = tensors
        self._check_peer("send", dst)
        message = self._message(SEND, tensor, dst, tag)
        self._members.mailbox.post_send(message, self._rank)
        return message

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        (tensor,) = tensors
        self._check_peer("recv", src)
        message = self._message(RECV, tensor, src, tag)
        self._members.mailbox.post_receive(message, self._rank)
        return message

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        (tensor,) = tensors
        message = self._message(RECV, tensor, None, tag)
        self._members.mailbox.post_receive(message, self._rank)
        return message

    def _message(
        self, kind: str, tensor: Tensor, peer: int | None, tag: int
    ) -> PostedMessage:
        self._check_ready(kind, (tensor,))
        self._calls += 1
        self._scheduler.shake()
        message = PostedMessage(self._scheduler, kind, tensor, self._members, peer, tag)
        if self._checks is not None:
            message.site = call_site()
            message.checks = self._checks.of_message(message)
        return message

    # -- collectives -------------------------------------------------------------------

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("all_gather", self._size, output, input)
        return self._collective(
            "all_gather_single", opts, [output], [output], [input],
            detail=(shape_and_dtype(input), shape_and_dtype(output)),
            steps=lambda check, whole, part: Part("all_gather", [whole], [part]),
        )  # fmt: skip

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("reduce_scatter", self._size, input, output)
        op = reduce_op(opts)
        return self._collective(
            "reduce_scatter_single", opts, [output], [output], [input], op=op,
            detail=(shape_and_dtype(input), shape_and_dtype(output)),
            steps=lambda check, part, whole: Part(
                "reduce_scatter", [part], [whole], op
            ),
        )  # fmt: skip

    def _one_by_one(
        self, method: Callable[..., dist.Work], calls: list[tuple], result: list[Tensor]
    ) -> dist.Work:
        works: Any = [method(*arguments) for arguments in calls]
        if works and isinstance(works[0], VirtualWork):
            return SeveralWorks(works, result)
        return Finished(result)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _collective(
        self,
        name: str,
        opts: Any,
        result: list[Tensor],
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        *,
        steps: Callable[..., Part],
        op: Any = None,
        root: int | None = None,
        detail: Any = None,
        extra_text: Callable[[], str] | None = None,
    ) -> dist.Work:
        tensors = (*inputs, *outputs)
        self._check_ready(name, tensors)
        if detail is None and tensors:
            detail = shape_and_dtype(tensors[0])
        self._calls += 1
        self._scheduler.shake()
        global_root = None if root is None else self.ranks[root]
        call = CollectiveCall(name, detail, op, global_root, call_site(), extra_text)
        flat_out = [flat(tensor) for tensor in outputs]
        flat_in = [flat(tensor) for tensor in inputs]
        part = steps(0, *flat_out, *flat_in)
        work = CollectiveWork(self._scheduler, call, part)
        work.tensors = result
        odd = [
            (tensor, row)
            for tensor, row in zip(outputs, flat_out, strict=True)
            if not tensor.is_contiguous()
        ]
        if odd:
            work.on_end = lambda _: copy_back(odd)
        if self._checks is not None:
            work.checks = self._checks.of_collective(work)
        self._members.collectives.post(work, self._rank)
        if opts is None or not opts.asyncOp:
            work.wait()
            return Finished(result)
        return VirtualWork(work, result)

    # ----------------------------------------------------------------------------------

    def _check_ready(self, name: str, tensors: Sequence[Tensor]) -> None:
        if self._closed:
            raise RuntimeError(f"{name}: this group has been destroyed")
        if get_ident() != self._thread:
            raise RuntimeError(
                f"{name}: called outside of its rank's thread: a rank of a virtual "
                "cluster is one thread, which ends with the run"
            )
        for tensor in tensors:
            if type(tensor) is not Tensor and has_own_dispatch(tensor):
                kind = type(tensor).__name__
                raise OwnDispatch(f"{name}: {NAME} does not serve {kind} as it stands")
            if tensor.layout is not torch.strided or not (
                tensor.is_cpu or tensor.is_meta
            ):
                raise ValueError(
                    f"{name}: {NAME} serves dense CPU tensors and tensors on meta, got "
                    f"{tensor.layout} on {tensor.device}"
                )

    def _check_peer(self, name: str, peer: int) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise ValueError(
                f"{name}: rank {self._rank} of {self._size} cannot exchange messages "
                f"with rank {peer}"
            )
        stand_in = self._members.stand_ins[peer]
        if stand_in not in (peer, self._rank):
            raise ValueError(
                f"{name}: rank {self.ranks[peer]} does not run, rank "
                f"{self.ranks[stand_in]} runs in its place: messages have two ends"
            )


def flat(tensor: Tensor) -> Tensor:
    """The elements in a row, unseen by autograd: its own memory where contiguous."""
    with unseen():
        return tensor.data.contiguous().view(-1)


def copy_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, row in pairs:
        with unseen():
            tensor.data.copy_(row.view(tensor.shape))


for _name in (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single",
    "reduce_scatter_single", "recv", "recv_anysource", "send",
):  # fmt: skip
    _method = getattr(VirtualGroup, _name)
    setattr(VirtualGroup, _name, as_operator(_name, _method))
