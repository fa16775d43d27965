"""lc6: attention over a sequence that is cut over the ranks of a group."""

from xtrain.context_parallel.all_gather_attention import all_gather_attention
from xtrain.context_parallel.balance import (
    local_positions,
    shard_sequence,
    unshard_sequence,
)
from xtrain.context_parallel.deal import Deal, deal_documents
from xtrain.context_parallel.flash import (
    flash_attention_backward,
    flash_attention_forward,
)
from xtrain.context_parallel.hybrid import hybrid_attention
from xtrain.context_parallel.online_softmax import (
    online_softmax,
    ring_online_softmax,
)
from xtrain.context_parallel.planned import sequence_mask
from xtrain.context_parallel.ring_attention import ring_attention
from xtrain.context_parallel.sequence_mask import SequenceMask
from xtrain.context_parallel.ulysses import ulysses_attention

__all__ = [
    "Deal",
    "SequenceMask",
    "all_gather_attention",
    "deal_documents",
    "flash_attention_backward",
    "flash_attention_forward",
    "hybrid_attention",
    "local_positions",
    "online_softmax",
    "ring_attention",
    "ring_online_softmax",
    "sequence_mask",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]
