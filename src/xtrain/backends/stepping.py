"""How a call becomes steps of a transport, and the steps a `Work` to wait for."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.backends.arguments import flatten
from xtrain.backends.calls import (
    NOWHERE,
    Call,
    CollectiveMismatch,
    call_site,
    fingerprint,
    shape_and_dtype,
)
from xtrain.backends.group import Group
from xtrain.backends.observers import profiling, record_event
from xtrain.backends.progress import Operation, Steps
from xtrain.backends.swaps import Swaps
from xtrain.backends.works import Finished, Pending
from xtrain.comm.ledger import record

SMALL = 16  # elements; see `_kept`


class SteppedGroup(Group):
    """A group that makes sure that all ranks are in the same call, and runs it."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._compare_lines = os.environ.get("XTRAIN_COMPARE_LINES", "0") != "0"
        self._swaps = Swaps(self._rank)

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
        extra_text: Callable[[], str] | None = None,
    ) -> dist.Work:
        """Describe the call, flatten its tensors, run or post its steps.

        `detail` is what the ranks compare besides op and root: the first tensor's shape
        and dtype unless given. `extra_text` is shown when they disagree, not compared.
        """
        tensors = (*inputs, *outputs)
        self._ready(name, tensors)
        if detail is None and tensors:
            detail = shape_and_dtype(tensors[0])
        call = Call(
            name, detail, op, None if root is None else self._global_rank(root),
            call_site(), extra_text,
        )  # fmt: skip
        # A library may have its reasons to call from two places. Barriers move no data.
        line = call.site if call.site.direct and name != "barrier" else NOWHERE
        # Calls with a root are often written `if rank == root: ... else: ...`.
        strict = self._compare_lines and root is None
        check = fingerprint(name, detail, op, call.root, line, strict)
        flat_out = [flatten(tensor) for tensor in outputs]
        flat_in = [flatten(tensor) for tensor in inputs]
        settle = record("collective", name, None, inputs or outputs)
        running = self._checked(call, steps(check, *flat_out, *flat_in), settle)
        for tensor, flat in zip(outputs, flat_out, strict=True):
            if not tensor.is_contiguous():
                running = copy_back(running, tensor, flat)
        operation = Operation(call, running, opts=opts)
        if profiling():
            title = f"{self._backend_name}:{name.removesuffix('_single')}"
            record_event(title, operation, inputs or outputs)
        self._calls += 1
        if opts is None or not opts.asyncOp:
            self._progress.run("collectives", operation)
            return Finished(result)
        self._progress.post("collectives", operation, self._post_seconds)
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
        transport.in_call, transport.line_mismatch = True, []
        try:
            yield from self._breaking(call, steps)
        except CollectiveMismatch:
            yield from self._breaking(call, transport.describe(str(call)))
            said = {r: transport.description(r) for r in transport.others}
            said[self._rank] = str(call)
            lines = [
                f"  rank {self._global_rank(r)}: {said[r]}" for r in range(self._size)
            ]
            raise RuntimeError(
                "the ranks of this group are in different calls:\n"
                + "\n".join(lines)
                + why_alike(set(said.values()))
            ) from None
        finally:
            transport.in_call = False
        if transport.line_mismatch:
            self._swaps.note(call, transport.line_mismatch)
        if settle is not None:
            settle(transport.sent - sent, transport.received - received)

    def _breaking(self, call: object, steps: Steps) -> Steps:
        """Run steps; an unforeseen end in the middle of them breaks the group."""
        try:
            yield from steps
        except (CollectiveMismatch, GeneratorExit):
            raise
        except BaseException as error:
            self._monitor.broken = RuntimeError(f"{call}: {error!r}")
            raise

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


def copy_back(steps: Steps, tensor: Tensor, flat: Tensor) -> Steps:
    """Run the steps, then fill a non-contiguous tensor from its flat copy."""
    yield from steps
    tensor.detach().copy_(flat.view(tensor.shape))


def why_alike(said: set[str]) -> str:
    """What to add when calls that are refused look alike."""
    if len(said) == 1:
        return "\nIs XTRAIN_COMPARE_LINES set on some ranks only?"
    if len({call.rpartition(" at ")[0] for call in said}) == 1:
        return "\nOnly their lines differ: XTRAIN_COMPARE_LINES=1 asks for equal ones."
    return ""
