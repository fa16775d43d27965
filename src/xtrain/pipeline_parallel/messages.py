"""Activations and gradients between ranks, in the order of the schedule, without tags.

    rank 0   SEND_F0 ------> RECV_F0   rank 1
             SEND_F1 ------> RECV_F1
             RECV_B0 <------ SEND_B0

What a rank sends to another arrives in that order, so both ends need only agree on the
order, which the schedule gives, and on what a message looks like:

- The first time, each activation follows a header with its shapes and dtypes. Both ends
  keep it. The gradient has the same shape, so it needs no header.
- From then on the receive of the next message of each rank is posted in advance, so the
  message arrives while this rank computes.

No rank waits for a send, but its tensor has to live until it has arrived. A message
that the receiver sent later proves that, so memory does not grow with the micro-batches
where messages go both ways. NCCL runs the messages of a group one after the other:
there a pair of ranks has a group for each direction, as a receive could block the send
that it waits for.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.comm.work import Work
from xtrain.pipeline_parallel.communicators import Pair, lane_groups
from xtrain.pipeline_parallel.lost_ranks import naming_lost_ranks
from xtrain.pipeline_parallel.message_header import (
    HEADER,
    Metas,
    TensorMeta,
    metas_of,
    read_header,
    write_header,
)
from xtrain.schedules import (
    Action,
    Schedule,
    forward_only,
    with_messages,
    with_reductions,
)
from xtrain.schedules.action import MESSAGES
from xtrain.schedules.passes import message_peer, neighbours


class Messages:
    """The messages of one rank's actions.

    `lanes` are the groups of pairs of ranks, if `group` is not to carry all messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: ProcessGroup | None,
        device: torch.device,
        lanes: Mapping[Pair, ProcessGroup] = MappingProxyType({}),
    ):
        group = group_or_world(group)
        self.schedule, self.device = schedule, device
        # headers are read, so they have data where messages are shapes alone
        self._of_headers = torch.device("cpu") if device.type == "meta" else device
        self.rank, self.group, self._lanes = group.rank(), group, lanes
        self._arrived = [
            sends_that_arrived(schedule, self.rank, peer)
            for peer in range(schedule.ranks)
        ]
        self.metas: dict[tuple[int, int], Metas | None] = {}
        """What each stage returns for each micro-batch; None if it has failed."""
        self.signature: object = None
        """Of the shapes that the ranks have agreed on; None for none."""
        self.begin(negotiate=True)

    def begin(self, negotiate: bool) -> None:
        """Start a step; if shapes are agreed, post the first receive of each rank."""
        self._negotiates = negotiate
        if negotiate:
            self.metas.clear()
        self._sends: dict[int, list[Work]] = defaultdict(list)
        self._expected: dict[int, deque[Action]] = defaultdict(deque)
        self._received: dict[int, int] = defaultdict(int)
        self._ended: dict[int, int] = defaultdict(int)  # so many of its sends
        self._posted: dict[int, tuple[tuple[Tensor, ...], Work]] = {}
        for action in self.schedule.actions[self.rank]:
            if action.kind in ("RECV_F", "RECV_B"):
                self._expected[message_peer(self.schedule, action)].append(action)
        if not negotiate:
            for peer in self._expected:
                self._await_next(peer)

    def send(self, action: Action, tensors: tuple[Tensor, ...] | None) -> None:
        """Start to send what a stage returned, or the gradients of its inputs.

        None if this rank has failed: it sends zeros in the shapes that are expected.
        """
        peer = message_peer(self.schedule, action)
        if action.kind == "SEND_F" and self._negotiates:
            metas = None if tensors is None else metas_of(tensors)
            self.metas[action.stage, action.micro_batch] = metas
            tensors = (write_header(metas).to(self._of_headers), *(tensors or ()))
        elif tensors is None:
            tensors = tuple(self._empty(x).zero_() for x in self._metas_of(action))
        tensors = tuple(t.detach().resolve_conj().contiguous() for t in tensors)
        group = self._lanes.get((self.rank, peer), self.group)
        with naming_lost_ranks(peer, self.group, action):
            works = post_each(group.send, tensors, peer)
        self._sends[peer].append(Work(works, keep=tensors))

    def recv(self, action: Action) -> tuple[Tensor, ...]:
        """Wait for a message; no tensors if the sender has failed."""
        peer = message_peer(self.schedule, action)
        if peer not in self._posted:
            if action.kind == "RECV_F":
                self._recv_header(peer, action)
            self._await_next(peer)
        tensors, work = self._posted.pop(peer)
        with naming_lost_ranks(peer, self.group, action):
            work.wait()
        self._expected[peer].popleft()
        if not self._negotiates and self._expected[peer]:
            self._await_next(peer)
        self._forget_sends(peer)
        for tensor, meta in zip(tensors, self._metas_of(action), strict=True):
            tensor.requires_grad_(meta.needs_gradient and action.kind == "RECV_F")
        return tensors

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for peer, works in self._sends.items():
            with naming_lost_ranks(peer, self.group, "the end of a step"):
                for work in works:
                    work.wait()
        self._sends.clear()

    def connect(self) -> None:
        """Exchange a first message with each rank that this one has messages with.

        NCCL connects two ranks at their first message, and waits for both. All ranks
        connect in one order, so none of them wait in a circle.
        """
        first = (torch.zeros(1, device=self.device),)
        own = self.schedule.actions[self.rank]
        for peer in sorted(
            {message_peer(self.schedule, a) for a in own if a.kind in MESSAGES}
        ):
            for pair in sorted([(self.rank, peer), (peer, self.rank)]):
                group = self._lanes.get(pair, self.group)
                with naming_lost_ranks(peer, self.group, "the first message"):
                    call = group.send if pair[0] == self.rank else group.recv
                    Work(post_each(call, first, peer)).wait()

    def agreed(self, stage: int, i: int) -> Metas | None:
        """What a stage has to return, if that is agreed."""
        return None if self._negotiates else self.metas[stage, i]

    def has_failed(self, action: Action) -> bool:
        """Whether nothing arrived, because the rank that sends has failed."""
        received = action.kind == "RECV_F"
        return received and self.metas[action.stage - 1, action.micro_batch] is None

    def _metas_of(self, action: Action) -> Metas:
        """What the tensors of a message look meta."""
        kind, stage, i, _ = action
        before = kind in ("RECV_F", "SEND_B")  # the stage that returned the activation
        metas = self.metas[stage - before, i] or ()
        return tuple(x for x in metas if kind.endswith("F") or x.needs_gradient)

    def _empty(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _await_next(self, peer: int) -> None:
        action = self._expected[peer][0]
        tensors = tuple(self._empty(meta) for meta in self._metas_of(action))
        self._posted[peer] = tensors, self._post_recv(peer, action, tensors)

    def _recv_header(self, peer: int, action: Action) -> None:
        numbers = torch.empty(HEADER, dtype=torch.int64, device=self._of_headers)
        with naming_lost_ranks(peer, self.group, action):
            self._post_recv(peer, action, (numbers,)).wait()
        self.metas[action.stage - 1, action.micro_batch] = read_header(numbers)

    def _post_recv(self, peer: int, action: Action, tensors: Iterable[Tensor]) -> Work:
        group = self._lanes.get((peer, self.rank), self.group)
        with naming_lost_ranks(peer, self.group, action):
            return Work(post_each(group.recv, tensors, peer))

    def _forget_sends(self, peer: int) -> None:
        """Free the sends whose arrival this message proves."""
        arrived = self._arrived[peer][self._received[peer]]
        self._received[peer] += 1
        for n in range(self._ended[peer], arrived):
            self._sends[peer][n].wait()
        self._ended[peer] = max(self._ended[peer], arrived)


def messages_of(
    schedule: Schedule, group: ProcessGroup | None, device: torch.device
) -> tuple[Messages, Messages]:
    """Those of a step, and those of its forwards alone, over the same groups.

    What this rank sends and receives depends on its neighbours and on theirs alone: of
    a long pipeline that is little.
    """
    lanes = lane_groups(schedule, group, device)
    near = neighbours(schedule, [group_or_world(group).rank()])
    farther = neighbours(schedule, near)
    part = replace(schedule, actions=tuple(
        order if rank in farther else [] for rank, order in enumerate(schedule.actions)
    ))  # fmt: skip
    whole, forward = with_reductions(part), forward_only(part)
    step = Messages(with_messages(whole, near), group, device, lanes)
    if lanes:
        step.connect()
    return step, Messages(with_messages(forward, near), group, device, lanes)


def post_each(
    call: Callable[..., dist.Work], tensors: Iterable[Tensor], peer: int
) -> list[dist.Work]:
    """Begin to send or to receive, one by one; empty tensors need no message."""
    return [call([as_real(t)], peer, 0) for t in tensors if t.numel() > 0]


def as_real(tensor: Tensor) -> Tensor:
    """The same memory in a real dtype: some backends have no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sends_that_arrived(schedule: Schedule, rank: int, peer: int) -> list[int]:
    """After each receive from `peer`: how many sends to it have arrived for certain."""
    arrived, proven = 0, []
    for action in schedule.actions[peer]:
        if action.kind in MESSAGES and message_peer(schedule, action) == rank:
            if action.kind.startswith("RECV"):
                arrived += 1
            else:
                proven.append(arrived)
    return proven
