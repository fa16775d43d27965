# mypy: disable-error-code="override,assignment,misc"
"""The backend "nccl-rules": computes on CPUs, and is as strict as NCCL.

    collective, batch     stream of the group         one after another
    unbatched message     stream of the two ranks     one after another, both directions
      with XTRAIN_NCCL_RULES_EAGER=1: the stream of the group, as after
      init_process_group(device_id=...)

CPU tensors are taken as if they lay on the device, so a program that was written for
gloo runs unchanged, or is told which rule of NCCL it breaks (`rules`). The bytes are
moved by the transport of `xtrain-shm`, across hosts by that of `xtrain-socket`.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import call_site
from xtrain.backends.nccl_rules.batches import Batches, frame_of_batch
from xtrain.backends.nccl_rules.board import board_of_this_rank
from xtrain.backends.nccl_rules.buffers import Buffers
from xtrain.backends.nccl_rules.messages import GROUP, PAIR, RECV, SEND, End, Wire
from xtrain.backends.nccl_rules.orders import check_order
from xtrain.backends.nccl_rules.refusals import (
    check_equal_parts,
    check_reduction,
    check_tensors,
)
from xtrain.backends.nccl_rules.rules import NcclRuleError, broken, in_words
from xtrain.backends.nccl_rules.streams import CallStream, StreamWork
from xtrain.backends.nccl_rules.watchdog import Watchdog
from xtrain.backends.observers import profiling, record_event
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.operators import as_operator
from xtrain.backends.peers import Peers
from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.shared_memory import SharedMemory
from xtrain.backends.sockets import Sockets
from xtrain.backends.works import Finished
from xtrain.comm.waits import Need

EAGER = "XTRAIN_NCCL_RULES_EAGER"


class NcclRulesGroup(XtrainProcessGroup):
    """One group of ranks under NCCL's rules; see the module's text."""

    monitor_class = Watchdog
    supports_coalescing = True  # see `Batches`

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._collective = self._ruled
        self._runner.mismatch = lambda text: NcclRuleError(
            "calls", f"{text}\n{in_words('calls')}"
        )
        self._board = board_of_this_rank()
        self._monitor.board = self._board  # type: ignore[attr-defined]
        self._wire = Wire(self._transport)
        self._batches = Batches(self._post_batch)
        self._streams: dict[str, CallStream] = {}
        self._eager = os.environ.get(EAGER, "0") == "1"
        self._joined = self._eager  # making the group has waited for all of its ranks

    def _stream(self, peer: int | None = None) -> CallStream:
        """The stream of the group, or that of this rank and a peer."""
        key = "group" if peer is None or self._eager else f"{peer}"
        if key not in self._streams:
            pair = [] if peer is None or key == "group" else [self._rank, peer]
            members = sorted(map(self._global_rank, pair or range(self._size)))
            kind = "pair" if pair else "group"
            name = f"{self.getGroupName()} {kind} {members}"
            self._streams[key] = self._board.add(name, members, self._progress)
        return self._streams[key]

    def shutdown(self) -> None:
        if not self._runner.closed:
            self._board.guard.settle()
        super().shutdown()
        self._board.leave(self._streams.values())

    abort = shutdown

    # -- collectives -------------------------------------------------------------------

    def _ruled(
        self,
        name: str,
        opts: Any,
        result: list[Tensor],
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        *,
        steps: Callable[..., Steps],
        op: ReduceOp.RedOpType | None = None,
        **described: Any,
    ) -> dist.Work:
        """Check the rules, then post the call in the stream of the group."""
        self._board.guard.settle()
        self._runner.check_ready(name, (*inputs, *outputs))
        check_tensors(name, (*inputs, *outputs), collective=True)
        if op is not None:
            check_reduction(name, op, (*inputs, *outputs)[0])
        if name in ("gather", "scatter"):
            check_equal_parts(name, [*outputs, *inputs])
        self._join_group(name)
        in_flight = bool(opts and opts.asyncOp)
        stream, buffers = self._stream(), Buffers(inputs, outputs, in_flight)
        event = f"{stream.name} collective"
        number = stream.count(event)
        others = [rank for rank in stream.members if rank != dist.get_rank()]
        needs = tuple(Need(rank, stream.name, event, number) for rank in others)
        work = StreamWork(stream, buffers, result, {event: number}, needs, number)
        count = len(outputs)
        work.operation = self._runner.prepare(
            name, opts, buffers.working[:count], buffers.working[count:], op=op,
            steps=lambda check, *flat: work.in_turn(steps(check, *flat)), **described,
        )  # fmt: skip
        check_order(self._board, work)
        self._post(work, in_flight)
        if name == "barrier":
            work.wait_on_host()
        if not in_flight:
            work.wait()
            return Finished(result)
        self._runner.kept.append(work)  # see `CallRunner.kept`
        return work

    def allgather_coalesced(self, *arguments: Any) -> dist.Work:
        raise broken("not there", "all_gather_coalesced", "it was called")

    # -- messages ----------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._batches.start()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._batches.end()

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._message(SEND, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._message(RECV, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise broken("any source", "recv", "it names no source")

    def _message(
        self, kind: int, tensors: list[Tensor], peer: int, tag: int
    ) -> dist.Work:
        (tensor,) = tensors
        self._board.guard.settle()
        self._runner.check_ready("send" if kind == SEND else "recv", tensors)
        end = End(kind, tensor, peer, self._global_rank(peer), tag, call_site())
        check_tensors(str(end), tensors, collective=False)
        batch = None if self._batches.bracketed else frame_of_batch()
        if batch is not None or self._batches.bracketed:
            return self._batches.add(end, batch)
        if peer == self._rank:
            raise broken("to itself", end, "it is not part of a batch")
        self._runner.check_peer("send" if kind == SEND else "recv", peer)
        stream = self._stream(peer)
        communicator = GROUP if self._eager else PAIR
        if not self._eager and not stream.posted:
            self._join_pair(stream, peer, end)
        buffers = self._buffers_of([end])
        return self._post_message(
            stream, [end], buffers, str(end),
            lambda: self._wire.message(end, communicator, buffers.working[0]),
        )  # fmt: skip

    def _post_batch(self, ends: list[End]) -> StreamWork:
        """Post the messages of a batch as one call in the stream of the group."""
        ends = sorted(ends, key=lambda end: -end.kind)  # receives first, as buffers are
        self._join_group("batch_isend_irecv")
        buffers = self._buffers_of(ends)
        call = f"batch_isend_irecv({', '.join(map(str, ends))})"
        return self._post_message(
            self._stream(), ends, buffers, call,
            lambda: self._wire.batch(ends, self._rank, buffers.working),
        )  # fmt: skip

    def _post_message(
        self, stream: CallStream, ends: list[End], buffers: Buffers, call: str,
        steps: Callable[[], Steps],
    ) -> StreamWork:  # fmt: skip
        events, needs = {}, []
        me = self._global_rank(self._rank)
        for end in ends:
            if end.peer == self._rank:
                continue
            src, dst = (me, end.name) if end.kind == SEND else (end.name, me)
            own, other = ("send", "recv") if end.kind == SEND else ("recv", "send")
            event = f"{stream.name} {src}>{dst} "
            events[event + own] = number = stream.count(event + own)
            needs.append(Need(end.name, stream.name, event + other, number))
        result = [end.tensor for end in ends]
        work = StreamWork(stream, buffers, result, events, tuple(needs))
        running = self._runner.breaking(call, work.in_turn(steps()))
        peers = tuple({end.peer for end in ends} - {self._rank})
        work.operation = Operation(call, running, peers)
        if profiling():
            one = "send" if ends[0].kind == SEND else "recv"
            title = one if len(ends) == 1 else "coalesced"
            record_event(f"{self._runner.backend}:{title}", work.operation, result)
        self._runner.calls += 1
        self._post(work)
        return work

    def _buffers_of(self, ends: list[End]) -> Buffers:
        sends = [end.tensor for end in ends if end.kind == SEND]
        receives = [end.tensor for end in ends if end.kind == RECV]
        return Buffers(sends, receives, in_flight=True)

    # -- both --------------------------------------------------------------------------

    def _post(self, work: StreamWork, in_flight: bool = True) -> None:
        """Queue a call; one in flight owns its tensors from now on."""
        stream, buffers = work.stream, work.buffers
        self._board.callers.add(threading.get_ident())
        for other in list(self._board.streams):
            used = other is not stream and other.using(buffers.inputs, buffers.outputs)
            if used:
                values = f"{used.operation.call} uses the same tensor, in flight"
                raise broken("two streams", work.operation.call, values)
        writer = stream.writing([*buffers.inputs, *buffers.outputs])
        if writer is None:
            buffers.begin()
        else:  # its results are this call's inputs, when its turn comes
            writer.deliver_at_end()
        with self._progress.lock:
            stream.calls.append(work)
        if in_flight:
            seconds = 0 if work.number is None else self._runner.post_seconds
            self._progress.post(stream.name, work.operation, seconds)
        else:
            self._progress.enqueue(stream.name, work.operation)

    def _join_group(self, name: str) -> None:
        """The first call of a group makes its communicator: all ranks wait here."""
        if self._joined or self._size == 1:
            return
        self._joined = True
        stream = self._stream()
        others = [rank for rank in stream.members if rank != dist.get_rank()]
        call = f"{name}() at {call_site()}, the first of this group,"
        self._join(stream, call, others, None, self._transport.barrier(0))

    def _join_pair(self, stream: CallStream, peer: int, end: End) -> None:
        call, others = f"{end}, the first between these ranks,", [end.name]
        self._join(stream, call, others, (peer,), self._wire.join(peer, end.site))

    def _join(
        self, stream: CallStream, call: str, others: list[int],
        peers: tuple[int, ...] | None, steps: Steps,
    ) -> None:  # fmt: skip
        event = f"{stream.name} communicator"
        number = stream.count(event)
        needs = tuple(Need(rank, stream.name, event, number) for rank in others)
        work = StreamWork(stream, Buffers((), (), False), [], {event: number}, needs)
        work.operation = Operation(call, work.in_turn(steps), peers)
        self._runner.calls += 1
        self._post(work, in_flight=False)
        work.wait_on_host()


def make_transport(
    store: Store, rank: int, size: int, timeout: float, peers: Peers
) -> Any:
    """Shared memory; sockets where xtrain-socket is set up to reach other hosts."""
    make = Sockets if "XTRAIN_SOCKET_ADDRESS" in os.environ else SharedMemory
    return make(store, rank, size, timeout, peers)


for _name in ("send", "recv", "recv_anysource", "allgather_coalesced"):
    setattr(NcclRulesGroup, _name, as_operator(_name, getattr(NcclRulesGroup, _name)))
