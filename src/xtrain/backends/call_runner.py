"""How a call becomes steps of a transport, and the steps a `Work` to wait for.

    describe the call -> its fingerprint -> steps of the transport -> run or post them

All ranks must be in the same call: the transport compares the fingerprints before any
data moves. If they differ, every rank shows what all ranks have called.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.arguments import check_servable, flatten
from xtrain.backends.calls import (
    NOWHERE,
    CallRefused,
    CollectiveCall,
    CollectiveMismatch,
    call_site,
    fingerprint,
    shape_and_dtype,
)
from xtrain.backends.observers import profiling, record_event
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.peers import PeerMonitor
from xtrain.backends.progress import CROWDED_POST_SECONDS, POST_SECONDS, Progress
from xtrain.backends.swaps import SwapDetector
from xtrain.backends.works import Finished, Pending
from xtrain.comm.transport_errors import PeersLost

SMALL = 16  # elements; see `kept`
Listener = Callable[[int, int], None]


class CallRunner:
    """Runs the calls of one rank in one group.

    Args:
        transport: moves the bytes.
        progress: advances the steps.
        monitor: knows whether the group is broken.
        global_rank: the rank in the default group of a rank of this group.
        compares_calls: the ranks make sure that all are in the same call.
        device: the type of the tensors that it takes.

    `on_collective_end` are functions to call with the bytes of tensors that a
    collective has sent and received, once it has ended: those that are in the list when
    the collective is issued. `mismatch` makes the error of ranks in different calls.
    """

    mismatch: Callable[[str], RuntimeError] = RuntimeError

    def __init__(
        self,
        backend: str,
        rank: int,
        transport: Any,
        progress: Progress,
        monitor: PeerMonitor,
        global_rank: Callable[[int], int],
        compares_calls: bool = True,
        device: str = "cpu",
    ):
        self.backend, self.rank, self.transport = backend, rank, transport
        self.progress, self.monitor = progress, monitor
        self.global_rank, self.compares_calls = global_rank, compares_calls
        self.device = device
        self.closed = False
        self.calls = 0
        self.on_collective_end: list[Listener] = []
        crowded = transport.size >= (os.cpu_count() or 1)
        self.post_seconds = CROWDED_POST_SECONDS if crowded else POST_SECONDS
        # torch's C++ may hold a work alone, and would wait forever on one whose Python
        # half is gone: DDP's join does so with its count of ranks.
        self.kept: deque[dist.Work] = deque(maxlen=16)
        self._compare_lines = os.environ.get("XTRAIN_COMPARE_LINES", "0") != "0"
        self._swaps = SwapDetector(rank)

    def collective(
        self,
        name: str,
        opts: Any,
        result: list[Tensor],
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        **described: Any,
    ) -> dist.Work:
        """Run or post a call; `described` are further arguments of `prepare`."""
        operation = self.prepare(name, opts, outputs, inputs, **described)
        if opts is None or not opts.asyncOp:
            self.progress.run("collectives", operation)
            return Finished(result)
        self.progress.post("collectives", operation, self.post_seconds)
        if operation.done and operation.error is None:
            work: dist.Work = Finished(result)
        else:
            work = Pending(self.progress, operation, result)
        if sum(t.numel() for t in result) <= SMALL:
            self.kept.append(work)
        return work

    def prepare(
        self,
        name: str,
        opts: Any,
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        *,
        steps: Callable[..., Steps],
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        detail: Any = None,
        extra_text: Callable[[], str] | None = None,
    ) -> Operation:
        """Describe the call and flatten its tensors: the operation to run or post.

        `detail` is what the ranks compare besides op and root: the first tensor's shape
        and dtype unless given. `extra_text` is shown when they disagree, not compared.
        """
        tensors = (*inputs, *outputs)
        self.check_ready(name, tensors)
        if detail is None and tensors:
            detail = shape_and_dtype(tensors[0])
        call = CollectiveCall(
            name, detail, op, None if root is None else self.global_rank(root),
            call_site() if self.compares_calls else NOWHERE, extra_text,
        )  # fmt: skip
        # A library may have its reasons to call from two places. Barriers move no data.
        line = call.site if call.site.direct and name != "barrier" else NOWHERE
        # Calls with a root are often written `if rank == root: ... else: ...`.
        strict = self._compare_lines and root is None
        check = 0  # is compared with nothing
        if self.compares_calls:
            check = fingerprint(name, detail, op, call.root, line, strict)
        flat_out = [flatten(tensor) for tensor in outputs]
        flat_in = [flatten(tensor) for tensor in inputs]
        running = self._checked(
            call, steps(check, *flat_out, *flat_in), tuple(self.on_collective_end)
        )
        for tensor, flat in zip(outputs, flat_out, strict=True):
            if not tensor.is_contiguous():
                running = copy_back(running, tensor, flat)
        operation = Operation(call, running, opts=opts)
        if profiling():
            title = f"{self.backend}:{name.removesuffix('_single')}"
            record_event(title, operation, inputs or outputs)
        self.calls += 1
        return operation

    def _checked(
        self, call: CollectiveCall, steps: Steps, listeners: tuple[Listener, ...]
    ) -> Steps:
        """Run steps; RuntimeError with all ranks' calls if they differ."""
        transport = self.transport
        sent, received = transport.sent, transport.received
        transport.in_call, transport.line_mismatch = True, []
        try:
            yield from self.breaking(call, steps)
        except CollectiveMismatch:
            yield from self.breaking(call, transport.describe(str(call)))
            texts = {r: transport.description(r) for r in transport.others}
            texts[self.rank] = str(call)
            lines = [
                f"  rank {self.global_rank(r)}: {texts[r]}"
                for r in range(self.transport.size)
            ]
            raise self.mismatch(
                "the ranks of this group are in different calls:\n"
                + "\n".join(lines)
                + why_alike(set(texts.values()))
            ) from None
        finally:
            transport.in_call = False
        if transport.line_mismatch:
            self._swaps.note(call, transport.line_mismatch)
        for listener in listeners:
            listener(transport.sent - sent, transport.received - received)

    def check_ready(self, name: str, tensors: Sequence[Tensor]) -> None:
        """RuntimeError when this group has ended, ValueError for a foreign tensor."""
        if self.monitor.broken is not None:
            broken = self.monitor.broken
            text = f"{name}: this group is broken: {broken}"
            raise PeersLost(text, getattr(broken, "ranks", ()))
        if self.closed:
            raise RuntimeError(f"{name}: this group has been destroyed")
        for tensor in tensors:
            check_servable(name, self.backend, tensor, self.device)

    def check_peer(self, name: str, peer: int) -> None:
        """ValueError for this rank itself and for what is not a rank."""
        size = self.transport.size
        if peer == self.rank or not 0 <= peer < size:
            raise ValueError(
                f"{name}: rank {self.rank} of {size} cannot exchange messages "
                f"with rank {peer}"
            )

    def breaking(self, call: object, steps: Steps) -> Steps:
        """Run steps; an unforeseen end in the middle of them breaks the group."""
        try:
            yield from steps
        except (CollectiveMismatch, CallRefused, GeneratorExit):
            raise
        except BaseException as error:
            self.monitor.broken = RuntimeError(f"{call}: {error!r}")
            raise

    def exchange(self, name: str, detail: Any, value: int) -> list[int]:
        """Every rank's number, in a call that all ranks must make alike."""
        mine = torch.tensor([value], device=self.device)
        gathered = mine.new_empty(self.transport.size)
        self.collective(
            name, None, [gathered], [gathered], [mine], detail=detail,
            steps=lambda check, whole, part: self.transport.all_gather(
                list(whole.view(self.transport.size, -1)), part, check
            ),
        )  # fmt: skip
        return gathered.tolist()


def copy_back(steps: Steps, tensor: Tensor, flat: Tensor) -> Steps:
    """Run the steps, then fill a non-contiguous tensor from its flat copy."""
    yield from steps
    tensor.detach().copy_(flat.view(tensor.shape))


def why_alike(texts: set[str]) -> str:
    """What to add when calls that are refused look alike."""
    if len(texts) == 1:
        return "\nIs XTRAIN_COMPARE_LINES set on some ranks only?"
    if len({call.rpartition(" at ")[0] for call in texts}) == 1:
        return "\nOnly their lines differ: XTRAIN_COMPARE_LINES=1 asks for equal ones."
    return ""
