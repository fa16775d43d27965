"""Forward of one micro-batch against backward of another, message under compute.

    compute   F attention | B mlp      | F mlp      | B attention
    network   B combine   | F dispatch | B dispatch | F combine

Experts on other ranks cost two all-to-alls in forward and two in backward. The same
micro-batch has nothing to compute meanwhile, but two micro-batches are independent:
while the rows of one are sent, the other computes. All four messages lie under a chunk
of the other micro-batch, and the block takes as long as its compute if no message takes
longer than the chunk above it.

The order is a cycle: F attention, B mlp, F mlp, B attention, then the next layer. It
may begin anywhere: "F mlp, B attention, F attention, B mlp" is the same cycle, begun
when a forward is half done. Here it begins with F attention, where neither micro-batch
has begun, so that a pair is complete within a layer.

Each rank of the group issues the same messages in the same order.

Sources: DeepSeek-AI, DeepSeek-V3, 2024, section 3.2.1 (the pair) and 3.4.1 (prefill
with two micro-batches).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.expert_parallel.checks import check_experts_call
from xtrain.expert_parallel.events import ChunkEvent
from xtrain.expert_parallel.gshard import GShardMoE
from xtrain.expert_parallel.moe import MoE
from xtrain.expert_parallel.overlap_backward import BackwardChunks
from xtrain.expert_parallel.overlap_chunks import ForwardChunks


class OverlappedMoEBlock(nn.Module):
    """A transformer block, y = h + moe(norm(h)) with h = attention(x).

    Called as a module it computes that with autograd's backward, without overlap.

    Args:
        attention: the first half of the block with its norm and residual, x -> h;
            also called with the block's `context`.
        moe: the experts.
        norm: between the two; none unless given.

    Attributes:
        events: a list to which the chunks append what they do.
    """

    def __init__(
        self, attention: nn.Module, moe: GShardMoE, norm: nn.Module | None = None
    ):
        super().__init__()
        check_moe(moe)
        self.attention, self.moe = attention, moe
        self.norm = nn.Identity() if norm is None else norm
        self.events: list[ChunkEvent] | None = None

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """The whole block, [..., H] in and out."""
        h = self.attention(x, *context)
        return h + self.moe(self.norm(h))

    def chunks(self, x: Tensor, *context: Any, batch: str = "F") -> ForwardChunks:
        """The forward of a micro-batch, to be run."""
        return ForwardChunks(self, x, *context, batch=batch)

    def run_with_backward(
        self, x: Tensor, other: ForwardChunks, grad: Tensor, *context: Any
    ) -> ForwardChunks:
        """The forward of `x`, and the backward of another micro-batch under it.

        Args:
            other: the finished forward of that, of this block or another.
            grad: of its output.

        Returns:
            The finished forward, with `.output`. The other's gradient is `other.dx`;
            those of weights are added to the parameters.
        """
        self.check("run_with_backward", x)
        forward = self.chunks(x, *context)
        run_pair(forward, BackwardChunks(other, grad))
        return forward

    def check(self, name: str, x: Tensor) -> None:
        """ValueError on every rank unless all have tokens that fit; one small message,
        before any other is under way."""
        check_experts_call(name, x, None, self.moe, self.moe.group)


def check_moe(moe: MoE) -> None:
    """ValueError unless the experts' messages are those that the chunks send."""
    own = type(moe).forward, type(moe).routed
    if own != (GShardMoE.forward, GShardMoE.routed):
        raise ValueError(
            f"{type(moe).__name__} computes or sends otherwise than GShardMoE: only "
            "GShardMoE can be cut into chunks"
        )
    if moe.once_a_rank or moe.placement is not None:  # type: ignore[attr-defined]
        raise ValueError(
            "chunks send a copy for each expert, to experts in order: neither "
            "once_a_rank=True nor a placement"
        )


def run_pair(forward: ForwardChunks, backward: BackwardChunks) -> None:
    """Run both, each message of one under a chunk of the other."""
    backward.issue_combine()
    forward.attention()
    forward.shared()
    backward.wait_combine()

    forward.issue_dispatch()
    backward.mlp()
    forward.wait_dispatch()

    backward.issue_dispatch()
    forward.mlp()
    backward.wait_dispatch()

    forward.issue_combine()
    backward.attention()
    forward.wait_combine()


@torch.no_grad()
def overlapped_prefill(
    blocks: OverlappedMoEBlock | Sequence[OverlappedMoEBlock],
    x0: Tensor,
    x1: Tensor,
    *context: Any,
) -> tuple[Tensor, Tensor]:
    """Two micro-batches through one block or several, in turns; forward only.

        compute   0 attention | 1 attention | 0 mlp      | 1 mlp     | 0 attention ...
        network   (1 combine) | 0 dispatch  | 1 dispatch | 0 combine | 1 combine   ...

    Args:
        x0, x1: may have different lengths.
    """
    several = [blocks] if isinstance(blocks, OverlappedMoEBlock) else list(blocks)
    for x in (x0, x1):
        several[0].check("overlapped_prefill", x)
    second: ForwardChunks | None = None
    for block in several:
        first = block.chunks(x0, *context, batch="F0")
        first.attention()
        first.shared()
        x1 = x1 if second is None else second.wait_combine()

        first.issue_dispatch()
        second = block.chunks(x1, *context, batch="F1")
        second.attention()
        second.shared()
        first.wait_dispatch()

        second.issue_dispatch()
        first.mlp()
        second.wait_dispatch()

        first.issue_combine()
        second.mlp()
        x0 = first.wait_combine()
        second.issue_combine()
    return x0, x1 if second is None else second.wait_combine()
