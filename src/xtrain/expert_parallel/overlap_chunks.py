"""The forward of a transformer block with experts, in chunks between its messages.

    attention, shared -> dispatch -> mlp -> combine

Each message is two calls, issue and wait; compute between the two hides it. Each chunk
is a graph of autograd of its own that begins with leaves, so its backward is one call
of autograd, and the messages between chunks are sent by hand (`overlap_backward`).

    x -[attention: and router, shared expert]-> base, gates, shared, copies
    copies ~dispatch~> rows -[mlp: the experts]-> outputs ~combine~> returned
    base, gates, shared, returned -[sum]-> y

Only forward has to learn how many rows arrive: the counts are issued after the router
and waited for right before dispatch is issued, so no wait for counts lies between the
issue and the wait of rows. Backward has the same plan.

Shapes: T tokens, H hidden, k experts of a token, M copies, N rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtrain.comm.work import Work
from xtrain.expert_parallel.dispatch import (
    DispatchPlan,
    copies_of,
    issue_combine,
    issue_counts,
    issue_dispatch,
    waited,
)
from xtrain.expert_parallel.events import ChunkEvent, event
from xtrain.expert_parallel.gshard import GShardMoE
from xtrain.expert_parallel.router import RouterStats, TopKRouter
from xtrain.expert_parallel.routing import weighted_sum

Issue = Callable[[Tensor, DispatchPlan], tuple[Work, Tensor]]


class HasChunks(Protocol):
    """What chunks are cut from: y = h + moe(norm(h)) with h = attention(x, ...)."""

    @property
    def attention(self) -> Callable[..., Tensor]: ...

    @property
    def norm(self) -> Callable[..., Tensor]: ...

    @property
    def moe(self) -> GShardMoE: ...

    @property
    def events(self) -> list[ChunkEvent] | None: ...


class ForwardChunks:
    """The forward of one micro-batch; call its methods in their order.

    Args:
        context: what attention is called with besides x.
        batch: its name in the block's `events`.
        in_pieces: leave pieces for `BackwardChunks`. Otherwise y has one graph, from x
            on, whose backward sends the messages.
        mask: of x without its last dim, False for padding.

    Attributes:
        output: y, after `wait_combine`; in pieces it is a leaf.
        dx: the gradient of x, after the backward; None if x has none.
        auxiliary: logits and probabilities of the router, for losses made of them;
            the backward adds their gradients.
    """

    output: Tensor

    def __init__(
        self,
        block: HasChunks,
        x: Tensor,
        *context: Any,
        batch: str = "F",
        in_pieces: bool = True,
        mask: Tensor | None = None,
    ):
        self.block, self.batch, self.context = block, batch, context
        self.mask_T = None if mask is None else mask.flatten()
        self.in_pieces = in_pieces
        self.begin = leaf if in_pieces else uncut
        self.x, self.shape = self.begin(x), x.shape
        self.dx: Tensor | None = None
        self.auxiliary: tuple[Tensor, ...] = ()
        self.pending: tuple[Work, Tensor] | None = None
        self.shared_TH: list[Tensor] = []  # of the shared expert, if there is one

    def attention(self) -> None:
        """Attention and the router; then the counts are issued."""
        moe = self.block.moe
        with self.event("attention", "compute"):
            h = self.block.attention(self.x, *self.context)
            self.base_TH = h.flatten(0, -2)
            x_TH = self.block.norm(h).flatten(0, -2)
            routing = moe.router(x_TH, self.mask_T)
            self.x_TH, self.routing = moe.before_experts(x_TH, routing)
        with self.event("counts", "issue"):
            given = self.routing, moe.group, moe.collectives
            self.counts, self.plan = issue_counts(*given)
        if self.in_pieces:
            self.auxiliary = cut_scores(moe.router)

    def shared(self) -> None:
        """The shared expert, which sends nothing."""
        if self.block.moe.shared is not None:
            with self.event("shared", "compute"):
                self.shared_TH.append(self.block.moe.shared(self.x_TH))

    def issue_dispatch(self) -> None:
        """Wait for the counts, then begin to send the copies."""
        with self.event("counts", "wait"):
            self.counts.wait()
        with self.event("dispatch", "issue"):
            self.copies_MH = copies_of(self.x_TH, self.plan)
            del self.x_TH
            self.pending = issue_dispatch(self.copies_MH.detach(), self.plan)

    def wait_dispatch(self) -> None:
        """Receive the rows of this rank's experts."""
        self.rows_NH = self.received("dispatch", self.copies_MH, issue_combine)

    def mlp(self) -> None:
        """The experts."""
        with self.event("mlp", "compute"):
            moe = self.block.moe
            self.outputs_NH = moe.experts(self.rows_NH, self.plan.counts_L)

    def issue_combine(self) -> None:
        """Begin to send the rows back."""
        with self.event("combine", "issue"):
            self.pending = issue_combine(self.outputs_NH.detach(), self.plan)

    def wait_combine(self) -> Tensor:
        """Receive the experts' outputs for this rank's tokens, and compute y."""
        sent_NH = self.outputs_NH
        self.returned_MH = self.received("combine", sent_NH, issue_dispatch)
        with self.event("sum", "compute"):
            ends = self.base_TH, self.routing.gates_Tk, *self.shared_TH
            self.parts = [self.begin(end) for end in ends]
            base_TH, gates_Tk, *shared_TH = self.parts
            y_TH = weighted_sum(self.returned_MH, gates_Tk, self.plan.copies_M)
            y_TH = self.block.moe.after_experts(sum(shared_TH, y_TH))
            self.sum = (base_TH + y_TH).view(self.shape)
        self.output = self.begin(self.sum)
        return self.output

    def run(self) -> Tensor:
        """All chunks, one after the other: y."""
        self.attention()
        self.shared()
        self.issue_dispatch()
        self.wait_dispatch()
        self.mlp()
        self.issue_combine()
        return self.wait_combine()

    def received(self, chunk: str, sent: Tensor, issue_back: Issue) -> Tensor:
        """Wait for the rows; they have a gradient if the sent ones have one."""
        assert self.pending is not None
        with self.event(chunk, "wait"):
            rows = waited(self.pending)
        self.pending = None
        if not self.in_pieces:
            return _Received.apply(sent, rows, self.plan, issue_back)
        return rows.requires_grad_(sent.requires_grad)

    def event(self, chunk: str, kind: str) -> AbstractContextManager:
        return event(self.block.events, self.batch, chunk, kind)


class _Received(torch.autograd.Function):
    """Rows sent -> rows received; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, rows: Tensor, plan: DispatchPlan, issue_back: Issue
    ) -> Tensor:
        ctx.plan, ctx.issue_back = plan, issue_back
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return waited(ctx.issue_back(grad, ctx.plan)), None, None, None


def cut_scores(router: TopKRouter) -> tuple[Tensor, Tensor]:
    """Logits and probabilities of the last forward as leaves, which losses then see."""
    assert router.stats is not None
    routing = router.stats.routing
    leaves = leaf(routing.logits_TE), leaf(routing.probabilities_TE)
    seen = replace(routing, logits_TE=leaves[0], probabilities_TE=leaves[1])
    router.stats = RouterStats(seen)
    return leaves


def leaf(tensor: Tensor) -> Tensor:
    """The same values, as a leaf of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def uncut(tensor: Tensor) -> Tensor:
    """The tensor in its graph."""
    return tensor
