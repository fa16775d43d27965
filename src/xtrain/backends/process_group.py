# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A torch.distributed backend in Python: torch's calls in, steps of a transport out.

torch hands every call of a group to methods of its `ProcessGroup`. A subclass written
in Python can be registered as a backend, and DDP, FSDP2, DTensor and pipelining never
know the difference. This one makes sure that all ranks are in the same call, lets the
transport do it, and returns a `Work` to wait for.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.arguments import (
    check_fits,
    check_servable,
    check_twins,
    flatten,
    one_dtype,
    row_sizes,
)
from xtrain.backends.calls import (
    NOWHERE,
    Call,
    Message,
    call_site,
    fingerprint,
    in_words,
    look,
    reduce_op,
    shape_of,
    shapes_of,
)
from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import Disagreement
from xtrain.backends.messages import DTYPE_CODES, Receive, arrival, raw, send_message
from xtrain.backends.progress import PATIENCE, Operation, Progress, Steps
from xtrain.backends.shared_tensors import reserve
from xtrain.backends.watching import Watch
from xtrain.backends.works import Finished, Pending
from xtrain.comm.ledger import record

# Two swapped calls of equal shape differ in nothing but their lines. Rooted collectives
# and barriers are often written `if rank == 0: ... else: ...`; of the others, where a
# line calls torch.distributed directly, all ranks are expected to run the same one.
COMPARE_LINES = os.environ.get("XTRAIN_COMPARE_LINES", "1") != "0"
SMALL = 16  # elements; see `_kept`


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
        self._closed = False
        self._calls = 0
        # torch's C++ may hold a work alone, and would wait forever on one whose Python
        # half is gone: DDP's join does so with its count of ranks.
        self._kept: deque[dist.Work] = deque(maxlen=16)
        self._peers = Peers()
        try:
            self._transport = make_transport(
                store, rank, size, self._timeout, self._peers
            )
        except BaseException:
            self._peers.close()
            raise
        self._watch = Watch(
            rank, self._transport, self._peers, self._timeout, self._global
        )
        self._progress = Progress(self._watch.check)
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
        check_twins("all_gather", self._rank, self._size, outputs_, input)
        looks = tuple(look(t) for t in outputs_)
        return self._collective(
            "all_gather", opts, outputs_, outputs_, [input], detail=looks,
            steps=lambda check, *flat: self._transport.all_gather(
                list(flat[:-1]), flat[-1], check
            ),
        )  # fmt: skip

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("all_gather", self._size, output, input)
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
        check_twins("reduce_scatter", self._rank, self._size, inputs_, output)
        op, looks = reduce_op(opts), tuple(look(t) for t in inputs_)
        return self._collective(
            "reduce_scatter", opts, outputs, [output], inputs_, op=op, detail=looks,
            steps=lambda check, out, *flat: self._transport.reduce_scatter(
                out, list(flat), op, check
            ),
        )  # fmt: skip

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("reduce_scatter", self._size, input, output)
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
        def told() -> str:
            sizes = [[t.numel() for t in tensors] for tensors in (inputs, outputs)]
            return f"sends {sizes[0]}, expects {sizes[1]}"

        return self._collective(
            "all_to_all", opts, outputs, outputs, inputs,
            detail=one_dtype("all_to_all", [*inputs, *outputs]),
            told=told,
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
        out_sizes = row_sizes(output, output_split_sizes, self._size)
        in_sizes = row_sizes(input, input_split_sizes, self._size)
        return self._collective(
            "all_to_all_single", opts, [output], [output], [input],
            detail=one_dtype("all_to_all_single", [input, output]),
            told=lambda: f"sends {in_sizes}, expects {out_sizes}",
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
            detail=one_dtype("gather", [input, *outputs_]),
            told=lambda: f"sends {shape_of(input)}, expects {shapes_of(outputs_)}",
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
            detail=one_dtype("scatter", [output, *inputs_]),
            told=lambda: f"sends {shapes_of(inputs_)}, expects {shape_of(output)}",
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

    def shared_empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `xtrain.backends.shared_empty`."""
        shared = getattr(self._transport, "shared", None)
        if shared is None:
            raise ValueError(
                f'shared_empty: needs a group on "xtrain-shm", '
                f"not on {self._backend_name}"
            )
        descriptor, error = -1, None
        try:
            descriptor = reserve(shape, dtype)
        except OSError as problem:
            error = problem
        try:
            descriptors = self._exchange("shared_empty", (shape, dtype), descriptor)
            if -1 not in descriptors:
                try:
                    tensor = shared.map(descriptors, shape, dtype)
                except (OSError, RuntimeError, ValueError) as problem:
                    error = problem
            fine = self._exchange("shared_empty", None, error is None)
        finally:
            if descriptor != -1:
                os.close(descriptor)  # everyone has mapped it
        if 0 in fine:
            failed = self._global(fine.index(0))
            raise RuntimeError(
                f"shared_empty: rank {failed} has no memory for "
                f"{in_words((shape, dtype))}"
            ) from error
        return tensor

    def _exchange(self, name: str, detail: Any, value: int) -> list[int]:
        """Every rank's number, in a call that all ranks must make alike."""
        mine = torch.tensor([value])
        everyone = mine.new_empty(self._size)
        self._collective(
            name, None, [everyone], [everyone], [mine], detail=detail,
            steps=lambda check, whole, part: self._transport.all_gather(
                list(whole.view(self._size, -1)), part, check
            ),
        )  # fmt: skip
        return everyone.tolist()

    # -- point-to-point ----------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self._ready("send", tensors)
        self._not_myself("send", dst)
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        peer = self._global(dst)
        record("send", "send", peer, [flat])
        call = Message("send", look(tensor), f"dst={peer}", call_site())
        steps = send_message(
            self._transport.outbox[dst], raw(flat), tag, DTYPE_CODES[flat.dtype],
            call.site,
        )  # fmt: skip
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
        self._ready("recv", tensors)
        landing = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        names = [self._global(source) for source in sources]
        record("recv", "recv", names[0] if len(names) == 1 else None, [landing])
        receive = Receive(raw(landing), tag, DTYPE_CODES[tensor.dtype])
        inboxes = [self._transport.inbox[source] for source in sources]
        call = Message("recv", look(tensor), f"src={names}", call_site())

        def steps() -> Steps:
            yield from self._breaking(call, arrival(receive, inboxes))
            if receive.error is not None:  # the message is gone, the group is fine
                raise RuntimeError(f"{call}: {receive.error}")
            if landing is not tensor:
                tensor.detach().copy_(landing)

        operation = Operation(call, steps(), sources)
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
        detail: Any = None,
        told: Callable[[], str] | None = None,
    ) -> dist.Work:
        """Describe the call, flatten its tensors, run or post its steps.

        `detail` is what the ranks compare besides op and root: the first tensor's shape
        and dtype unless given. `told` is shown when they disagree, but not compared.
        """
        tensors = (*inputs, *outputs)
        self._ready(name, tensors)
        if detail is None and tensors:
            detail = look(tensors[0])
        call = Call(
            name, detail, op, None if root is None else self._global(root),
            call_site(), told,
        )  # fmt: skip
        lines = COMPARE_LINES and call.site.direct and root is None
        compared = call.site if lines and name != "barrier" else NOWHERE
        check = fingerprint(name, detail, op, call.root, compared)
        flat_out = [flatten(tensor) for tensor in outputs]
        flat_in = [flatten(tensor) for tensor in inputs]
        settle = record("collective", name, None, inputs or outputs)
        running = self._checked(call, steps(check, *flat_out, *flat_in), settle)
        for tensor, flat in zip(outputs, flat_out, strict=True):
            if not tensor.is_contiguous():
                running = copy_back(running, tensor, flat)
        operation = Operation(call, running)
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
        self, call: Call, steps: Steps, settle: Callable[[int, int], None] | None
    ) -> Steps:
        """Run steps; when the ranks turn out to be in different calls, say which."""
        transport = self._transport
        sent, received = transport.sent, transport.received
        transport.in_call = True
        try:
            yield from self._breaking(call, steps)
        except Disagreement:
            yield from self._breaking(call, transport.describe(str(call)))
            said = {r: transport.description(r) for r in transport.others}
            said[self._rank] = str(call)
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

    def _breaking(self, call: object, steps: Steps) -> Steps:
        """Run steps; an unforeseen end in the middle of them breaks the group."""
        try:
            yield from steps
        except (Disagreement, GeneratorExit):
            raise
        except BaseException as error:
            self._watch.broken = RuntimeError(f"{call}: {error!r}")
            raise

    def _global(self, rank: int) -> int:
        """What this rank of the group is called in the world."""
        if not self._world_ranks:
            try:
                self._world_ranks = dist.get_process_group_ranks(self)
            except (KeyError, ValueError, RuntimeError):
                return rank  # torch has not registered this group (yet)
        return self._world_ranks[rank]

    def _ready(self, name: str, tensors: Sequence[Tensor]) -> None:
        """RuntimeError when this group has ended, ValueError for a foreign tensor."""
        if self._watch.broken is not None:
            raise RuntimeError(f"{name}: this group is broken: {self._watch.broken}")
        if self._closed:
            raise RuntimeError(f"{name}: this group has been destroyed")
        for tensor in tensors:
            check_servable(name, self._backend_name, tensor)

    def _not_myself(self, name: str, peer: int) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise ValueError(
                f"{name}: rank {self._rank} of {self._size} cannot exchange messages "
                f"with rank {peer}"
            )

    def _one_by_one(
        self, method: Callable[..., dist.Work], calls: list[tuple], result: list[Tensor]
    ) -> dist.Work:
        works = [method(*arguments) for arguments in calls]
        for work in works:
            work.wait()
        return Finished(result)


def copy_back(steps: Steps, tensor: Tensor, flat: Tensor) -> Steps:
    """Run the steps, then fill a non-contiguous tensor from its flat copy."""
    yield from steps
    tensor.detach().copy_(flat.view(tensor.shape))


def same_but_for_lines(said: dict[int, str]) -> bool:
    return len({call.rpartition(" at ")[0] for call in said.values()}) == 1


LINES_DIFFER = (
    "\nThe calls differ in nothing but their lines. If that is meant, set "
    "XTRAIN_COMPARE_LINES=0."
)
