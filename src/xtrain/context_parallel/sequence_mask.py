"""What the tokens of one rank see of another rank's: one block of attention.

nothing                                     the block is skipped
all, or a triangle (`block_of`)             a kernel without a mask
what a window and documents leave of it     tiles, each with a mask of its own
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH
from xtrain.context_parallel.balance import Block, block_of, positions_of
from xtrain.context_parallel.mask import Tokens, Visible
from xtrain.plan.context_parallel import ring_steps


class SequenceMask:
    """The mask of a whole sequence, asked for block by block.

    Args:
        size: the ranks it is cut over.
        queries, keys: their numbers on each rank.
        documents: of all ranks, [size, B, S].
    """

    def __init__(
        self,
        size: int,
        queries: int,
        keys: int,
        causal: bool,
        balance: str = "none",
        window: int | None = None,
        documents: Tensor | None = None,
    ):
        self.size, self.queries, self.keys = size, queries, keys
        self.causal, self.balance = causal, balance
        self.window, self.documents = window, documents
        self.blocks: dict[tuple[int, int], Block | None] = {}

    @property
    def steps(self) -> int:
        """The number of ranks whose keys a rank needs, itself included."""
        runs = self.causal and self.balance == "none"
        return ring_steps(self.keys, self.size, self.window if runs else None)

    def block(self, query_rank: int, key_rank: int) -> Block | None:
        """What the queries of one rank see of another's keys; None for nothing."""
        ranks = query_rank, key_rank
        if ranks not in self.blocks:  # backward asks again
            self.blocks[ranks] = self.make_block(*ranks)
        return self.blocks[ranks]

    def make_block(self, query_rank: int, key_rank: int) -> Block | None:
        """The same, from positions and documents."""
        if self.causal:
            block = block_of(self.balance, query_rank, key_rank, self.keys, True)
        else:  # as many queries as keys, or another number
            block = Block(slice(0, self.queries), slice(0, self.keys), False)
        if block is None or (self.window is None and self.documents is None):
            return block
        seen = Visible(
            self.tokens(query_rank, self.queries).part(block.queries),
            self.tokens(key_rank, self.keys).part(block.keys),
            self.causal,
            self.window,
        )
        if seen.hides_nothing():
            return block
        return None if seen.hides_everything() else block._replace(sees=seen)

    def tokens(self, rank: int, length: int) -> Tokens:
        """Of one rank."""
        with torch.device("cpu"):  # where masks are made, as the documents are
            positions = positions_of(rank, self.size, length, self.balance)
        return Tokens(
            positions, None if self.documents is None else self.documents[rank]
        )


def mask_of_call(
    q: Tensor,
    k: Tensor,
    causal: bool,
    balance: str,
    window: int | None,
    documents: Tensor | None,
    group: ProcessGroup | None,
) -> SequenceMask:
    """The mask of the sequences of all ranks, whose document ids are gathered."""
    _, size = rank_and_size(group)
    if documents is not None:
        mine = documents.detach().to(torch.int64).contiguous()
        gathered = mine.new_empty(size, *mine.shape)
        TORCH.all_gather(gathered.view(-1), mine.view(-1), group=group).wait()
        documents = gathered.cpu()  # where masks are made
    lengths = q.shape[2], k.shape[2]
    return SequenceMask(size, *lengths, causal, balance, window, documents)
