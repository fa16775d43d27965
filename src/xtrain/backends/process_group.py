# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A torch.distributed backend in Python: torch's calls in, steps of a transport out.

torch hands every call of a group to methods of its `ProcessGroup`. A subclass written
in Python can be registered as a backend, and DDP, FSDP2, DTensor and pipelining never
know the difference. This one makes sure that all ranks are in the same call, lets the
transport do it, and returns a `Work` to wait for.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import call_site, fingerprint
from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import Disagreement
from xtrain.backends.messages import DTYPE_CODES, Receive, raw, send_message
from xtrain.backends.progress import PATIENCE, Operation, Progress, Steps
from xtrain.comm.ledger import record

# Two swapped calls of equal shape differ in nothing but their lines. Rooted collectives
# and barriers are often written `if rank == 0: ... else: ...`; of the others, where a
# line calls torch.distributed directly, all ranks are expected to run the same one.
COMPARE_LINES = os.environ.get("XTRAIN_COMPARE_LINES", "1") != "0"
SMALL = 16  # elements; see `_kept`


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
        seconds = timeout.total_seconds() if timeout else float("inf")
        self._progress.wait(self._operation, seconds)
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
        make_transport: Callable[[Store, int, int, float, Peers], Any],
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
    ):
        super().__init__(rank, size)
        self._backend_name, self._rank, self._size = backend, rank, size
        self._timeout = timeout.total_seconds()
        self._names: dict[str, str] = {}
        self._world_ranks: list[int] = []
        self._broken: RuntimeError | None = None
        self._closed = False
        self._calls = 0
        # torch's C++ may hold a work alone, and would wait forever on one whose Python
        # half is gone: DDP's join does so with its count of ranks.
        self._kept: deque[dist.Work] = deque(maxlen=16)
        self._first_seen_dead: float | None = None
        self._peers = Peers()
        try:
            self._transport = make_transport(
                store, rank, size, self._timeout, self._peers
            )
        except BaseException:
            self._peers.close()
            raise
        self._progress = Progress(self._check_waiting)
        # A process that ends in good order says so, as if it had destroyed the group.
        self._leave = Finalize(self, self._transport.close, exitpriority=1)

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

    def _get_sequence_number_for_group(self) -> int:
        """How many calls this rank has made."""
        return self._calls

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank are told."""
        if not self._closed:
            self._closed = True
            self._progress.close(RuntimeError("this group has been destroyed"))
            self._leave()
            self._kept.clear()
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
        self._twins("all_gather", outputs_, input)
        shapes = [shape_of(t) for t in outputs_]
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
        self._twins("reduce_scatter", inputs_, output)
        op, shapes = reduce_op(opts), [shape_of(t) for t in inputs_]
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
        sizes = [[t.numel() for t in tensors] for tensors in (inputs, outputs)]
        return self._collective(
            "all_to_all", opts, outputs, outputs, inputs,
            detail=self._one_dtype("all_to_all", [*inputs, *outputs]),
            told=f"sends {sizes[0]}, expects {sizes[1]}",
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
            detail=self._one_dtype("all_to_all_single", [input, output]),
            told=f"sends {in_sizes}, expects {out_sizes}",
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
            "gather", opts, outputs_, outputs_, [input], root=root,
            detail=self._one_dtype("gather", [input, *outputs_]),
            told=f"sends {shape_of(input)}, expects {[shape_of(t) for t in outputs_]}",
            steps=steps,
        )  # fmt: skip

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
            "scatter", opts, outputs, [output], inputs_, root=root,
            detail=self._one_dtype("scatter", [output, *inputs_]),
            told=f"sends {[shape_of(t) for t in inputs_]}, expects {shape_of(output)}",
            steps=steps,
        )  # fmt: skip

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
        record("send", "send", self._global(dst), [flat])
        site, _ = call_site()
        steps = send_message(
            self._transport.outbox[dst], raw(flat), tag, DTYPE_CODES[flat.dtype], site
        )
        call = f"send({shape_of(tensor)}, dst={self._global(dst)}) at {site}"
        operation = Operation(call, self._breaking(call, steps), (dst,))
        self._calls += 1
        self._progress.post(("send", dst), operation)
        return Pending(self._progress, operation, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        self._not_myself("recv", src)
        return self._receive(tensors, (src,), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, tuple(self._transport.others), tag)

    def _receive(
        self, tensors: list[Tensor], sources: tuple[int, ...], tag: int
    ) -> dist.Work:
        (tensor,) = tensors
        self._ready("recv", tensor)
        landing = tensor.detach().contiguous()
        names = [self._global(source) for source in sources]
        record("recv", "recv", names[0] if len(names) == 1 else None, [landing])
        receive = Receive(raw(landing), tag, DTYPE_CODES[tensor.dtype])
        inboxes = [self._transport.inbox[source] for source in sources]
        call = f"recv({shape_of(tensor)}, src={names}) at {call_site()[0]}"

        def steps() -> Steps:
            for inbox in inboxes:
                inbox.post(receive)
            while not receive.done:
                for inbox in inboxes:
                    inbox.pump()
                if not receive.done:
                    yield
            if not tensor.is_contiguous() and receive.error is None:
                tensor.detach().copy_(landing)

        def checked() -> Steps:
            yield from self._breaking(call, steps())
            if receive.error is not None:  # the message is gone, the group is fine
                raise RuntimeError(f"{call}: {receive.error}")

        operation = Operation(call, checked(), sources)
        self._calls += 1
        self._progress.post(("recv", id(receive)), operation)
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
        told: str = "",
    ) -> dist.Work:
        """Describe the call, flatten its tensors, run or post its steps.

        `detail` is what the ranks compare besides op and root: the first tensor's shape
        and dtype unless given. `told` is shown when they disagree, but not compared.
        """
        for tensor in (*outputs, *inputs):
            self._ready(name, tensor)
        if not outputs:
            self._ready(name, None)
        if detail is None:
            detail = shape_of((*inputs, *outputs)[0]) if outputs else ""
        site, direct = call_site()
        call = signature(name, detail, op, None if root is None else self._global(root))
        lines = COMPARE_LINES and direct and root is None and name != "barrier"
        check = fingerprint(call, site if lines else "")
        flat_out = [t.detach().contiguous().view(-1) for t in outputs]
        flat_in = [t.detach().contiguous().view(-1) for t in inputs]
        settle = record("collective", name, None, inputs or outputs)
        called = f"{call}{told and f' {told}'} at {site}"
        running = self._checked(called, steps(check, *flat_out, *flat_in), settle)
        strided = [
            (tensor, flat)
            for tensor, flat in zip(outputs, flat_out, strict=True)
            if not tensor.is_contiguous()
        ]
        if strided:
            running = copy_back(running, strided)
        operation = Operation(called, running)
        self._calls += 1
        if opts is None or not opts.asyncOp:
            self._progress.run("collectives", operation)
            return Finished(result)
        self._progress.post("collectives", operation, PATIENCE)
        if operation.done and operation.error is None:
            work: dist.Work = Finished(result)
        else:
            work = Pending(self._progress, operation, result)
        if sum(t.numel() for t in result) <= SMALL:
            self._kept.append(work)
        return work

    def _checked(
        self, call: str, steps: Steps, settle: Callable[[int, int], None] | None
    ) -> Steps:
        """Run steps; when the ranks turn out to be in different calls, say which."""
        transport = self._transport
        sent, received = transport.sent, transport.received
        transport.in_call = True
        try:
            yield from self._breaking(call, steps)
        except Disagreement:
            yield from self._breaking(call, transport.describe(call))
            said = {r: transport.description(r) for r in transport.others}
            said[self._rank] = call
            lines = [f"  rank {self._global(r)}: {said[r]}" for r in range(self._size)]
            raise RuntimeError(
                "the ranks of this group are in different calls:\n"
                + "\n".join(lines)
                + (LINES_DIFFER if same_but_for_lines(said) else "")
            ) from None
        finally:
            transport.in_call = False
        if settle is not None:
            settle(transport.sent - sent, transport.received - received)

    def _breaking(self, call: str, steps: Steps) -> Steps:
        """Run steps; an unforeseen end in the middle of them breaks the group."""
        try:
            yield from steps
        except (Disagreement, GeneratorExit):
            raise
        except BaseException as error:
            self._broken = RuntimeError(f"{call}: {error!r}")
            raise

    def _check_waiting(self, operation: Operation) -> None:
        """Raise when `operation` waits in vain."""
        me = f"rank {self._global(self._rank)} waited in {operation.call}"
        missing = self._transport.missing()
        left = {*self._transport.left()}
        died = [r for r in self._peers.dead() if r not in left]
        lost = self._transport.lost()
        dead = {*died, *lost}
        if dead:
            now = time.monotonic()
            self._first_seen_dead = self._first_seen_dead or now
            owed = operation.peers is not None or dead & {*missing}
            if owed or now > self._first_seen_dead + self._transport.PATIENCE:
                how = "died" if died else "is gone (its connection ended)"
                self._break(f"{self._names_of(died or lost)} {how} while {me}")
        needed = missing if operation.peers is None else operation.peers
        gone = left & {*needed}
        # Of several possible senders one is enough.
        if gone and (operation.peers is None or gone == {*needed}):
            self._break(f"{self._names_of(sorted(gone))} left the group while {me}")
        if operation.waited() > self._timeout:
            states = [
                f"rank {self._global(r)} ({self._peers.state(r)})" for r in needed
            ]
            where = "not there" if operation.peers is None else "nothing came from"
            self._break(
                f"timed out: {me} for {operation.waited():.1f} s; "
                f"{where}: {', '.join(states) or 'nobody, all are in this call'}"
            )

    def _break(self, why: str) -> None:
        self._broken = RuntimeError(why)
        raise self._broken

    def _global(self, rank: int) -> int:
        """What this rank of the group is called in the world."""
        if not self._world_ranks:
            try:
                self._world_ranks = dist.get_process_group_ranks(self)
            except (KeyError, ValueError, RuntimeError):
                return rank  # torch has not registered this group (yet)
        return self._world_ranks[rank]

    def _names_of(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {self._global(rank)}" for rank in ranks)

    def _ready(self, name: str, tensor: Tensor | None) -> None:
        if self._broken is not None:
            raise RuntimeError(f"{name}: this group is broken: {self._broken}")
        if self._closed:
            raise RuntimeError(f"{name}: this group has been destroyed")
        if tensor is None:
            return
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: {self._backend_name} serves dense CPU tensors, "
                f"got {tensor.layout} on {tensor.device}"
            )
        if tensor.dtype not in DTYPE_CODES or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{name}: {self._backend_name} does not serve {tensor.dtype}"
                f"{' in a lazy view (use resolve_conj)' * tensor.is_conj()}"
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

    def _twins(self, name: str, pieces: Sequence[Tensor], own: Tensor) -> None:
        if len(pieces) != self._size or shape_of(pieces[self._rank]) != shape_of(own):
            raise ValueError(
                f"{name}: rank {self._rank} of {self._size} gave "
                f"{[shape_of(t) for t in pieces]} for its {shape_of(own)}"
            )

    def _one_dtype(self, name: str, tensors: Sequence[Tensor]) -> torch.dtype:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"{name}: one call moves one dtype, got {dtypes}")
        return dtypes.pop()

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


def signature(
    name: str, detail: object, op: ReduceOp.RedOpType | None, root: int | None
) -> str:
    """A call as all its ranks should see it: "all_reduce([8] float32, SUM)"."""
    parts = [str(detail)] if detail != "" else []
    parts += [op.name] if op is not None else []
    parts += [f"root={root}"] if root is not None else []
    return f"{name}({', '.join(parts)})"


def same_but_for_lines(said: dict[int, str]) -> bool:
    return len({call.rpartition(" at ")[0] for call in said.values()}) == 1


LINES_DIFFER = (
    "\nThe calls differ in nothing but their lines. If that is meant, set "
    "XTRAIN_COMPARE_LINES=0."
)


def shape_of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
