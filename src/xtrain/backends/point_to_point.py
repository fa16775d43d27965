"""Sends and receives as operations: sends to one peer stay in order."""

import torch.distributed as dist
from torch import Tensor

from xtrain.backends.arguments import host_view
from xtrain.backends.call_runner import CallRunner
from xtrain.backends.calls import PointToPointCall, call_site
from xtrain.backends.messages import DTYPE_CODES, Receive, arrival, raw, send_message
from xtrain.backends.observers import profiling, record_event
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.works import Pending


def post_send(runner: CallRunner, tensor: Tensor, dst: int, tag: int) -> dist.Work:
    """Post a message; it leaves after those sent to `dst` before."""
    tensors = [tensor]
    runner.check_ready("send", tensors)
    runner.check_peer("send", dst)
    flat = contiguous(tensor)
    peer = runner.global_rank(dst)
    call = PointToPointCall("send", tensor, "dst", peer, call_site())
    steps = send_message(
        runner.transport.outbox[dst], raw(flat), tag, DTYPE_CODES[flat.dtype],
        call.site,
    )  # fmt: skip
    operation = Operation(call, runner.breaking(call, steps), (dst,))
    if profiling():
        record_event(f"{runner.backend}:send", operation, [flat])
    runner.calls += 1
    runner.progress.post(("send", dst), operation)
    return Pending(runner.progress, operation, tensors)


def post_receive(
    runner: CallRunner, tensor: Tensor, sources: tuple[int, ...], tag: int
) -> dist.Work:
    """Post a receive of the first message with this tag from one of `sources`."""
    tensors = [tensor]
    runner.check_ready("recv", tensors)
    buffer = contiguous(tensor)
    names = [runner.global_rank(source) for source in sources]
    posted = Receive(raw(buffer), tag, DTYPE_CODES[tensor.dtype])
    inboxes = [runner.transport.inbox[source] for source in sources]
    call = PointToPointCall("recv", tensor, "src", names, call_site())

    def steps() -> Steps:
        yield from runner.breaking(call, arrival(posted, inboxes))
        if posted.error is not None:  # the message is gone, the group is fine
            raise RuntimeError(f"{call}: {posted.error}")
        if not tensor.is_contiguous():
            tensor.detach().copy_(buffer)

    operation = Operation(call, steps(), sources)
    if profiling():
        record_event(f"{runner.backend}:recv", operation, [buffer])
    runner.calls += 1
    runner.progress.post(("recv", id(posted)), operation)
    work = Pending(runner.progress, operation, tensors)
    work._receive = posted
    return work


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor's own memory on the host, or a copy where it has gaps."""
    host = host_view(tensor)
    return host if host.is_contiguous() else host.detach().contiguous()
