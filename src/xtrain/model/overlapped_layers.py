"""A stage's forward of one micro-batch, run with another's backward layer by layer.

    forward    embedding | layer 0 | layer 1 |  ------  | norm, head
    backward   head      | layer 3 |  ------ | layer 2  | embedding
                           experts: in chunks  dense: alone

A layer whose experts lie on other ranks is cut into chunks. In a pair of such layers,
one of forward and one of backward, the messages of each are sent under the other's
compute. A layer without a partner is run alone.

A forward whose backward may come in a pair leaves each layer as a graph of its own, and
`_Joint` in the graph of the stage's output: autograd's backward that arrives there runs
the layers' graphs, or stops, so that a pair runs them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from xtrain.expert_parallel.checks import check_experts_call
from xtrain.expert_parallel.moe import MoE
from xtrain.expert_parallel.overlap import run_pair
from xtrain.expert_parallel.overlap_backward import BackwardChunks, backward
from xtrain.expert_parallel.overlap_chunks import ForwardChunks, cut_scores, leaf


class Alone:
    """A layer that is not cut into chunks, as one piece.

    Losses made of its routing begin at leaves, as those of chunks do.
    """

    def __init__(self, layer: nn.Module, x: Tensor, *context: Any):
        self.x = leaf(x)
        self.end = layer(self.x, *context)
        self.scores: list[Tensor] = []
        self.leaves: list[Tensor] = []
        for part in layer.modules():
            if isinstance(part, MoE) and part.router.stats is not None:
                routing = part.router.stats.routing
                self.scores += routing.logits_TE, routing.probabilities_TE
                self.leaves += cut_scores(part.router)
        self.output: Tensor = leaf(self.end)

    def backward(self, grad: Tensor) -> Tensor | None:
        """The gradient of its input."""
        gradients = [end.grad for end in self.leaves]
        backward([self.end, *self.scores], [grad, *gradients])
        return self.x.grad


Pieces = Iterator[Alone | BackwardChunks]
"""Of a backward: chunks, to be run before the next is asked for, or what has been."""


class LayersForward:
    """The layers of one micro-batch, in pieces.

    Attributes:
        entry: what the first was called with; its graph goes on before it.
        pieces: of the layers that have been run, in order.
    """

    def __init__(self, entry: Tensor):
        self.entry = entry
        self.pieces: list[Alone | ForwardChunks] = []
        self._stops = False
        self._caught: Tensor | None = None

    def joined(self) -> Tensor:
        """What the layers returned, for the rest of the stage."""
        if not self.pieces:
            return self.entry
        x = self.pieces[-1].output
        return _Joint.apply(x, self) if x.requires_grad else x

    def arrived(self, grad: Tensor) -> None:
        """Autograd's backward is here: continue, unless a pair does."""
        if self._stops:
            self._caught = grad
            return
        for piece in self.backwards(grad):
            if isinstance(piece, BackwardChunks):
                piece.run()

    def backward_to_here(
        self, outputs: Sequence[GradientEdge], gradients: Sequence[Tensor | None]
    ) -> Pieces:
        """The backward of norm and head, after the layers; then the layers' pieces."""
        self._stops = True
        try:
            torch.autograd.backward(list(outputs), list(gradients))
        finally:
            self._stops = False
        grad, self._caught = self._caught, None
        return self.backwards(grad)

    def backwards(self, grad: Tensor | None) -> Pieces:
        """The pieces from the last to the first: chunks to be run before the next is
        asked for, others when they have been."""
        while self.pieces and grad is not None:
            piece = self.pieces.pop()
            if isinstance(piece, ForwardChunks):
                yield BackwardChunks(piece, grad)
                grad = piece.dx
            else:
                grad = piece.backward(grad)
                yield piece
        if grad is not None and self.entry.requires_grad:
            torch.autograd.backward(self.entry, grad)


class _Joint(torch.autograd.Function):
    """The end of the layers' pieces and the beginning of the graph after them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: LayersForward) -> Tensor:
        ctx.layers = layers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        with torch.enable_grad():
            ctx.layers.arrived(grad)
        return None, None


def layers_before(outputs: Sequence[GradientEdge]) -> LayersForward | None:
    """The pieces on the path of a backward from here; None if there are none."""
    seen: set[Node] = set()
    nodes = [edge.node for edge in outputs]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            layers = getattr(node, "layers", None)
            if isinstance(layers, LayersForward):
                return layers
            nodes += [other for other, _ in node.next_functions if other is not None]
    return None


def forward_over(
    layers: Iterable[Any],
    backwards: Pieces,
    in_pieces: bool,
    x: Tensor,
    positions: Tensor,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """The layers' forward, and the pieces of a backward under it.

    Args:
        layers: those with experts on other ranks have `moe`.
        in_pieces: leave pieces of this forward, for a later pair.
        mask: [B, S], False for padding.
        documents: [B, S], the number of each token's document.
    """
    done = LayersForward(x)
    context = positions, mask, documents
    for layer in layers:
        if not hasattr(layer, "moe"):  # no messages of experts
            if in_pieces:
                done.pieces.append(Alone(layer, x, *context))
            x = done.pieces[-1].output if in_pieces else layer(x, *context)
            continue
        forward = ForwardChunks(
            layer, x, positions, documents, in_pieces=in_pieces, mask=mask
        )
        check_experts_call("DecoderLayer", x, mask, layer.moe, layer.moe.group)
        chunks = (piece for piece in backwards if isinstance(piece, BackwardChunks))
        partner = next(chunks, None)
        if partner is None:
            forward.run()
        else:
            run_pair(forward, partner)
        done.pieces.append(forward)
        x = forward.output
    for piece in backwards:
        if isinstance(piece, BackwardChunks):
            piece.run()
    return done.joined() if in_pieces else x
