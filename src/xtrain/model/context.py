"""The sequence of a batch, cut over the ranks of a mesh's axis "context".

    tokens, labels, positions    whole on every rank    0 1 2 3 4 5 6 7
    zigzag on 2 ranks            rank 0: 0 1 6 7        rank 1: 2 3 4 5

Only attention looks at several tokens, so only attention sends messages: all else works
on the rank's own tokens, with their positions in the whole sequence. The weights are
whole on every context rank, and their gradients are summed after backward.

Shapes: B batch, N query heads, K key/value heads, S sequence, D head size, c ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.autograd import check_divides
from xtrain.comm.mesh import axis_group
from xtrain.context_parallel import (
    SequenceMask,
    all_gather_attention,
    deal_documents,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.context_parallel.balance import (
    BALANCES,
    Balance,
    check_balance,
    positions_of,
)
from xtrain.context_parallel.sequence_mask import Dropout
from xtrain.model.config import XtrainConfig
from xtrain.model.mesh_axes import axis_size

ATTENTIONS = ("ring", "all_gather", "ulysses")
BY_DOCUMENT = "documents"
"""The balance that deals out each document of a batch: see `deal_documents`."""


class SequenceCut(NamedTuple):
    """Which tokens this rank has, and the attention of its layers.

    Attributes:
        attention: one of `ATTENTIONS`.
        balance: as `shard_sequence`'s, or "documents".
    """

    attention: str
    balance: Balance
    group: ProcessGroup

    def of_batch(self, length: int, documents: Tensor | None) -> "SequenceCut":
        """The cut of these sequences: another for each batch, if it goes by documents.

        Args:
            documents: [B, S], whole; sequences without are one document each.
        """
        if self.balance != BY_DOCUMENT:
            return self
        ids = torch.zeros(1, length) if documents is None else documents
        return self._replace(balance=deal_documents(ids, self.group.size()))

    def plan(self, length: int, documents: Tensor | None) -> SequenceMask:
        """What all tokens see, for all layers of a batch and both passes.

        No messages: each rank has the documents of whole sequences.
        """
        size = self.group.size()
        local = length // size
        ids = None
        if documents is not None:
            whole = documents.detach().to("cpu", torch.int64)
            held = [positions_of(r, size, local, self.balance) for r in range(size)]
            ids = torch.stack([whole[:, positions.cpu()] for positions in held])
        return SequenceMask(size, local, local, True, self.balance, None, ids)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a sequence that is whole on every rank."""
        return shard_sequence(x, dim, self.balance, self.group)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """All ranks' tokens, in the order of the whole sequence."""
        return unshard_sequence(x, dim, self.balance, self.group)

    def attend(
        self,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        is_causal: bool = False,
        enable_gqa: bool = False,
        window: int | None = None,
        documents: SequenceMask | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Called as `scaled_dot_product_attention` is, with S / c tokens a rank.

        Args:
            documents: the `plan` of the batch, where it has any, or windows.
            dropout: the factors of probabilities, by heads of this rank and positions.
        """
        del enable_gqa  # heads may always be grouped
        qkv, balance = (q_BNSD, k_BKSD, v_BKSD), self.balance
        mask = None if documents is None else documents.within(window)
        if mask is not None:
            window, balance = None, mask.balance
        options: dict[str, Any] = {"causal": is_causal, "window": window, "mask": mask}
        options |= {"group": self.group, "dropout": dropout}
        if self.attention == "ulysses":
            return ulysses_attention(*qkv, **options)
        over = ring_attention if self.attention == "ring" else all_gather_attention
        return over(*qkv, balance=balance, **options)

    def check_sequence(self, length: int, tensor_ranks: int = 1) -> None:
        """ValueError unless a sequence of this length can be cut so.

        Args:
            tensor_ranks: which cut each context rank's tokens once more.
        """
        size = self.group.size()
        check_balance(
            "none" if self.balance == BY_DOCUMENT else self.balance, length, size
        )
        here = f"sequence of {length} on {size} context ranks"
        check_divides(here, length // size, tensor_ranks)


def sequence_cut(
    config: XtrainConfig,
    mesh: DeviceMesh | None,
    attention: object,
    context_attention: str,
    context_balance: str | None,
) -> SequenceCut | None:
    """How the options of a model cut its sequences; None for sequences that stay whole.

    Args:
        attention: the function for one device, which the context's replaces.

    Raises:
        ValueError: an option is unknown, two of them exclude each other, or there are
            not enough heads.
    """
    check_options(context_attention, context_balance)
    group = axis_group(mesh, "context")
    if group is None or group.size() == 1:
        return None
    if attention is not F.scaled_dot_product_attention:
        raise ValueError(
            f"attention= is for whole sequences, but {group.size()} context ranks have "
            f"parts of them: choose context_attention, one of {', '.join(ATTENTIONS)}"
        )
    if context_attention == "ulysses":
        tensor = axis_size(mesh, "tensor")
        check_divides("num_attention_heads", config.num_attention_heads, tensor)
        heads = config.num_attention_heads // tensor
        if heads % group.size():
            raise ValueError(
                f'context_attention="ulysses" on {group.size()} context ranks: a '
                f"tensor rank has {heads} of {config.num_attention_heads} query heads, "
                "which must be divisible by them; ring and all_gather cut no heads"
            )
        return SequenceCut(context_attention, "none", group)
    return SequenceCut(context_attention, context_balance or "zigzag", group)


def check_options(attention: str, balance: str | None) -> None:
    """ValueError for unknown ones, on any mesh."""
    if attention not in ATTENTIONS:
        raise ValueError(
            f"context_attention={attention!r} is none of {', '.join(ATTENTIONS)}"
        )
    known = *BALANCES, BY_DOCUMENT
    if balance is not None and balance not in known:
        raise ValueError(f"context_balance={balance!r} is none of {', '.join(known)}")
    if attention == "ulysses" and balance not in (None, "none"):
        raise ValueError(
            f'context_balance={balance!r} with context_attention="ulysses": its heads '
            'see the sequence in order, so it is cut into runs, balance "none"'
        )
