# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A torch.distributed backend in Python: torch's calls in, steps of a transport out.

torch hands every call of a group to methods of its `ProcessGroup`. A subclass written
in Python can be registered as a backend, and DDP, FSDP2, DTensor and pipelining never
know the difference. This one makes sure that all ranks are in the same call, lets the
transport do it, and returns a `Work` to wait for.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import call_site, fingerprint
from xtrain.backends.liveness import Peers
from xtrain.backends.messages import DTYPE_CODES, Receive, raw, send_message
from xtrain.backends.progress import Operation, Progress, Steps
from xtrain.comm.ledger import record

# A rooted collective is often written `if rank == root: ... else: ...`; of the others
# all ranks are expected to run one and the same line.
COMPARE_LINES = os.environ.get("XTRAIN_COMPARE_LINES", "1") != "0"


class Finished(dist.Work):
    """The work of a call that has returned already."""

    def __init__(self, result: list[Tensor]):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


class Pending(dist.Work):
    """The work of a call under way."""

    def __init__(self, progress: Progress, operation: Operation, result: list[Tensor]):
        super().__init__()
        self._progress, self._operation, self._result = progress, operation, result
        self._receive: Receive | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._progress.wait(self._operation)
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> list[Tensor]:
        return self._result

    def _source_rank(self) -> int:
        """The group rank whose message a receive took."""
        source = None if self._receive is None else self._receive.source
        return -1 if source is None else source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        operation = self._operation

        def settle() -> None:
            if operation.error is None:
                future.set_result(self._result)
            else:
                future.set_exception(operation.error)

        self._progress.when_ended(operation, settle)
        return future


class XtrainProcessGroup(dist.ProcessGroup):
    """One group of ranks over one transport.

    Errors are RuntimeErrors: a peer that died or left is named together with the call
    that waited for it; ranks in different calls see all ranks' calls.
    """

    def __init__(
        self,
        backend: str,
        make_transport: Callable[[Store, int, int, float], Any],
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
    ):
        super().__init__(rank, size)
        self._backend_name, self._rank, self._size = backend, rank, size
        self._timeout = timeout.total_seconds()
        self._names: dict[str, str] = {}
        self._broken: RuntimeError | None = None
        self._closed = False
        self._transport = make_transport(store, rank, size, self._timeout)
        self._peers = Peers(self._transport.pids)
        self._progress = Progress(self._check_waiting)

    # -- what torch asks a group about itself ------------------------------------------

    def getBackendName(self) -> str:
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names.get("name", "")

    def setGroupDesc(self, description: str) -> None:
        self._names["desc"] = description

    def getGroupDesc(self) -> str:
        return self._names.get("desc", "")

    @property
    def group_name(self) -> str:
        return self.getGroupName()

    @property
    def group_desc(self) -> str:
        return self.getGroupDesc()

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank are told."""
        if not self._closed:
            self._closed = True
            self._progress.close()
            self._transport.close()
            self._peers.close()

    abort = shutdown

    # -- collectives -------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        opts = opts or dist.AllreduceOptions()
        op = reduce_op(opts)
        return self._collective(
            "all_reduce", opts, tensors, [tensor], op=op,
            steps=lambda check, flat: self._transport.all_reduce(flat, op, check),
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._one_by_one(self.allreduce, [([t], opts) for t in tensors], tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        root = opts.rootRank
        return self._collective(
            "broadcast", opts, tensors, [tensor], root=root,
            steps=lambda check, flat: self._transport.broadcast(flat, root, check),
        )  # fmt: skip

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        root, op = opts.rootRank, reduce_op(opts)
        return self._collective(
            "reduce", opts, tensors, [tensor], op=op, root=root,
            steps=lambda check, flat: self._transport.reduce(flat, root, op, check),
        )  # fmt: skip

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (outputs_,), (input,) = outputs, inputs
        shapes = [list(t.shape) for t in outputs_]
        return self._collective(
            "all_gather", opts, outputs_, outputs_, [input], detail=shapes,
            steps=lambda check, *flat: self._transport.all_gather(
                list(flat[:-1]), flat[-1], check
            ),
        )  # fmt: skip

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        self._fits("all_gather", output, input)
        return self._collective(
            "all_gather_single", opts, [output], [output], [input],
            steps=lambda check, whole, part: self._transport.all_gather(
                list(whole.view(self._size, -1)), part, check
            ),
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        (output,), (inputs_,) = outputs, inputs
        op, shapes = reduce_op(opts), [list(t.shape) for t in inputs_]
        return self._collective(
            "reduce_scatter", opts, outputs, [output], inputs_, op=op, detail=shapes,
            steps=lambda check, out, *flat: self._transport.reduce_scatter(
                out, list(flat), op, check
            ),
        )  # fmt: skip

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        self._fits("reduce_scatter", input, output)
        op = reduce_op(opts)
        return self._collective(
            "reduce_scatter_single", opts, [output], [output], [input], op=op,
            steps=lambda check, out, flat: self._transport.reduce_scatter(
                out, list(flat.view(self._size, -1)), op, check
            ),
        )  # fmt: skip

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "all_to_all", opts, outputs, outputs, inputs, detail="",
            steps=lambda check, *flat: self._transport.all_to_all(
                list(flat[: self._size]), list(flat[self._size :]), check
            ),
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        out_sizes = self._row_sizes(output, output_split_sizes)
        in_sizes = self._row_sizes(input, input_split_sizes)
        return self._collective(
            "all_to_all_single", opts, [output], [output], [input],
            detail=list(output.shape[1:]),
            steps=lambda check, out, flat: self._transport.all_to_all(
                list(out.split(out_sizes)), list(flat.split(in_sizes)), check
            ),
        )  # fmt: skip

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        root, (input,) = opts.rootRank, inputs
        outputs_ = outputs[0] if self._rank == root else []
        nothing = input.new_empty(0)

        def steps(check: int, *flat: Tensor) -> Steps:
            sent = [nothing] * self._size
            sent[root] = flat[-1]
            landing = list(flat[:-1]) or [nothing] * self._size
            return self._transport.all_to_all(landing, sent, check)

        return self._collective(
            "gather",
            opts,
            outputs_,
            outputs_,
            [input],
            root=root,
            detail=input.dtype,
            steps=steps,
        )

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        root, (output,) = opts.rootRank, outputs
        inputs_ = inputs[0] if self._rank == root else []
        nothing = output.new_empty(0)

        def steps(check: int, *flat: Tensor) -> Steps:
            landing = [nothing] * self._size
            landing[root] = flat[0]
            sent = list(flat[1:]) or [nothing] * self._size
            return self._transport.all_to_all(landing, sent, check)

        return self._collective(
            "scatter",
            opts,
            outputs,
            [output],
            inputs_,
            root=root,
            detail=output.dtype,
            steps=steps,
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective(
            "barrier", opts, [], steps=lambda check: self._transport.barrier(check)
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._one_by_one(self.all_gather_single, calls, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._one_by_one(self.reduce_scatter_single, calls, outputs)

    # torch before 2.13 calls them by these names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- point-to-point ----------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self._ready("send", tensor)
        self._not_myself("send", dst)
        flat = tensor.detach().contiguous()
        record("send", "send", dist.get_global_rank(self, dst), [flat])
        site = call_site()
        steps = send_message(
            self._transport.outbox[dst], raw(flat), tag, DTYPE_CODES[flat.dtype], site
        )
        call = f"send({shape_of(tensor)}, dst={dst}) at {site}"
        operation = self._progress.post(("send", dst), call, steps)
        return Pending(self._progress, operation, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        self._not_myself("recv", src)
        return self._receive(tensors, [src], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, list(self._transport.inbox), tag)

    def _receive(
        self, tensors: list[Tensor], sources: list[int], tag: int
    ) -> dist.Work:
        (tensor,) = tensors
        self._ready("recv", tensor)
        landing = tensor.detach()
        if not landing.is_contiguous():
            landing = landing.contiguous()
        peer = dist.get_global_rank(self, sources[0]) if len(sources) == 1 else None
        record("recv", "recv", peer, [landing])
        receive = Receive(raw(landing), tag, DTYPE_CODES[tensor.dtype])
        inboxes = [self._transport.inbox[source] for source in sources]
        call = f"recv({shape_of(tensor)}, src={sources}) at {call_site()}"

        def steps() -> Steps:
            for inbox in inboxes:
                inbox.post(receive)
            while not receive.done:
                for inbox in inboxes:
                    inbox.pump()
                if not receive.done:
                    yield
            if receive.error is not None:
                raise RuntimeError(f"{call}: {receive.error}")
            if landing.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(landing)

        operation = self._progress.post(("recv", id(receive)), call, steps())
        work = Pending(self._progress, operation, tensors)
        work._receive = receive
        return work

    # -- how a call becomes steps ------------------------------------------------------

    def _collective(
        self,
        name: str,
        opts: Any,
        result: list[Tensor],
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        *,
        steps: Callable[..., Steps],
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        detail: object = None,
    ) -> dist.Work:
        """Describe the call, flatten its tensors, run or post its steps.

        `detail` is what the ranks compare besides op and root: the first tensor's shape
        and dtype unless given.
        """
        for tensor in (*outputs, *inputs):
            self._ready(name, tensor)
        site = call_site()
        tensors = [*inputs, *outputs]
        if detail is None and tensors:
            detail = shape_of(tensors[0])
        call = f"{name}({detail}, {op}, root={root})"
        check = fingerprint(call, site if root is None and COMPARE_LINES else "")
        flat_out = [t.detach().contiguous().view(-1) for t in outputs]
        flat_in = [t.detach().contiguous().view(-1) for t in inputs]
        sent = list(inputs) or list(outputs)
        record("collective", name, None, sent)
        described = f"{call} at {site}"
        running = self._checked(described, steps(check, *flat_out, *flat_in))
        strided = [
            (tensor, flat)
            for tensor, flat in zip(outputs, flat_out, strict=True)
            if not tensor.is_contiguous()
        ]
        if strided:
            running = copy_back(running, strided)
        if opts is not None and opts.asyncOp:
            operation = self._progress.post("collectives", described, running)
            if not operation.done or operation.error is not None:
                return Pending(self._progress, operation, result)
        else:
            self._progress.run("collectives", described, running)
        return Finished(result)

    def _checked(self, call: str, steps: Steps) -> Steps:
        """Run steps; when the ranks turn out to be in different calls, say which."""
        try:
            yield from steps
        except self._transport.Disagreement:
            yield from self._transport.describe(call)
            said = {r: self._transport.description(r) for r in self._transport.others}
            said[self._rank] = call
            lines = [f"  rank {r}: {said[r]}" for r in range(self._size)]
            raise RuntimeError(
                "the ranks of this group are in different calls:\n" + "\n".join(lines)
            ) from None

    def _check_waiting(self, operation: Operation) -> None:
        """Raise when `operation` waits in vain."""
        me = f"rank {self._rank} waited in {operation.call}"
        dead = sorted({*self._peers.dead(), *self._transport.lost()})
        if dead:
            names = ", ".join(f"rank {r}" for r in dead)
            self._broken = RuntimeError(f"{names} died while {me}")
            raise self._broken
        gone = self._transport.left()
        if gone:
            names = ", ".join(f"rank {r}" for r in gone)
            self._broken = RuntimeError(f"{names} left the group while {me}")
            raise self._broken
        seconds = operation.waited()
        if seconds > self._timeout:
            missing = [
                f"rank {r} ({self._peers.state(r)})" for r in self._transport.missing()
            ]
            self._broken = RuntimeError(
                f"timed out: {me} for {seconds:.1f} s; not there: "
                f"{', '.join(missing) or 'nobody, the message never came'}"
            )
            raise self._broken

    def _ready(self, name: str, tensor: Tensor) -> None:
        if self._broken is not None:
            raise RuntimeError(f"{name}: this group is broken: {self._broken}")
        if self._closed:
            raise RuntimeError(f"{name}: this group has been destroyed")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: {self._backend_name} serves dense CPU tensors, "
                f"got {tensor.layout} on {tensor.device}"
            )

    def _not_myself(self, name: str, peer: int) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise ValueError(
                f"{name}: rank {self._rank} of {self._size} cannot exchange messages "
                f"with rank {peer}"
            )

    def _fits(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: {shape_of(whole)} must hold {self._size} times "
                f"{shape_of(part)}"
            )

    def _row_sizes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank, from rows for each rank (none given: equal ones)."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all_single: {rows} rows do not divide by "
                    f"{self._size} ranks"
                )
            splits = [rows // self._size] * self._size
        if sum(splits) != rows or len(splits) != self._size:
            raise ValueError(
                f"all_to_all_single: splits {list(splits)} for {rows} rows "
                f"and {self._size} ranks"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits]

    def _one_by_one(
        self, method: Callable[..., dist.Work], calls: list[tuple], result: list[Tensor]
    ) -> dist.Work:
        works = [method(*arguments) for arguments in calls]
        for work in works:
            work.wait()
        return Finished(result)


def copy_back(steps: Steps, strided: list[tuple[Tensor, Tensor]]) -> Steps:
    """Run the steps, then fill non-contiguous tensors from their flat copies."""
    yield from steps
    for tensor, flat in strided:
        tensor.detach().copy_(flat.view(tensor.shape))


def reduce_op(opts: Any) -> ReduceOp.RedOpType:
    op = opts.reduceOp if opts is not None else ReduceOp.SUM
    for known in OPS:
        if op == known:
            return known
    raise ValueError(f"reduce op {op} is not supported")


OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.MAX,
    ReduceOp.MIN,
    ReduceOp.PRODUCT,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)


def shape_of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
