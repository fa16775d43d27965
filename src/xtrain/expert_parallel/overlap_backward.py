"""The backward of a micro-batch whose forward was run in chunks, in reverse.

    combine -> mlp -> dispatch -> attention, shared

Each chunk is one call of autograd on the piece that forward left, and messages are sent
by hand: gradients of what combine returned are dispatched, and those of dispatched rows
are combined. No counts are sent: the plan is forward's.

Shapes: M copies, N rows, H hidden.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from xtrain.comm.work import Work
from xtrain.expert_parallel.dispatch import issue_combine, issue_dispatch, waited
from xtrain.expert_parallel.events import event
from xtrain.expert_parallel.overlap_chunks import ForwardChunks


class BackwardChunks:
    """The backward of a micro-batch whose forward was `ForwardChunks`.

    Args:
        forward: finished; used up by this.
        grad: the gradient of its output.
    """

    def __init__(self, forward: ForwardChunks, grad: Tensor, *, batch: str = "B"):
        if not forward.in_pieces or not hasattr(forward, "sum"):
            raise ValueError(
                "this micro-batch has no finished forward in pieces: that comes first, "
                "and one backward uses it up"
            )
        self.forward, self.grad, self.batch = forward, grad, batch
        self.pending: tuple[Work, Tensor] | None = None

    def issue_combine(self) -> None:
        """The weighted sum; begin to send the gradients of the experts' outputs."""
        forward = self.forward
        with self.event("sum", "compute"):
            backward([forward.sum], [self.grad])
        with self.event("combine", "issue"):
            if forward.outputs_NH.requires_grad:
                grad_MH = gradient_of(forward.returned_MH)
                self.pending = issue_dispatch(grad_MH, forward.plan)
        del forward.sum, forward.returned_MH, self.grad

    def wait_combine(self) -> None:
        """Receive the gradients of this rank's experts' outputs."""
        self.grad_NH = self.received("combine")

    def mlp(self) -> None:
        """The experts' backward, with the gradients of their weights."""
        with self.event("mlp", "compute"):
            backward([self.forward.outputs_NH], [self.grad_NH])
        del self.forward.outputs_NH, self.grad_NH

    def issue_dispatch(self) -> None:
        """Begin to send the gradients of the rows back to their tokens."""
        forward = self.forward
        with self.event("dispatch", "issue"):
            if forward.rows_NH.requires_grad:
                self.pending = issue_combine(gradient_of(forward.rows_NH), forward.plan)
        del forward.rows_NH

    def wait_dispatch(self) -> None:
        """Receive the gradients of this rank's copies."""
        self.grad_MH = self.received("dispatch")

    def attention(self) -> Tensor | None:
        """Shared expert, router and attention; dx, None if x has no gradient."""
        forward, routing = self.forward, self.forward.routing
        outer = *forward.auxiliary, *forward.parts
        scores = routing.logits_TE, routing.probabilities_TE
        inner = *scores, forward.base_TH, routing.gates_Tk, *forward.shared_TH
        with self.event("attention", "compute"):
            backward(
                [*inner, forward.copies_MH],
                [*(t.grad for t in outer), self.grad_MH],
            )
        forward.dx = forward.x.grad
        for name in ("parts", "base_TH", "shared_TH", "copies_MH", "routing", "x"):
            delattr(forward, name)
        forward.auxiliary = ()
        return forward.dx

    def run(self) -> Tensor | None:
        """All chunks, one after the other: dx."""
        self.issue_combine()
        self.wait_combine()
        self.mlp()
        self.issue_dispatch()
        self.wait_dispatch()
        return self.attention()

    def received(self, chunk: str) -> Tensor | None:
        """The gradients, when they have arrived; None if no rank has any."""
        with self.event(chunk, "wait"):
            rows = None if self.pending is None else waited(self.pending)
        self.pending = None
        return rows

    def event(self, chunk: str, kind: str) -> AbstractContextManager:
        return event(self.forward.block.events, self.batch, chunk, kind)


def gradient_of(tensor: Tensor) -> Tensor:
    """Its `.grad`, or zeros."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def backward(outputs: list[Tensor], gradients: list[Tensor | None]) -> None:
    """One call of autograd, from the outputs that have a graph and a gradient."""
    roots, given = [], []
    for output, grad in zip(outputs, gradients, strict=True):
        if output.requires_grad and grad is not None:
            roots.append(output)
            given.append(grad)
    if roots:
        torch.autograd.backward(roots, given)
