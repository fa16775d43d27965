"""Cross-entropy as a sum over valid tokens, divided once by their count.

Shapes: B batch, S sequence, V vocabulary.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import all_reduce_identity
from xtrain.tensor_parallel import vocab_parallel_cross_entropy

IGNORED = -100


def mean_cross_entropy(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    tensor: ProcessGroup | None = None,
    data: ProcessGroup | None = None,
) -> Tensor:
    """The mean loss of all tokens whose label is not -100, in at least fp32.

    Without any such token the loss is 0, and so are its gradients.

    Args:
        tensor: the ranks over which the vocabulary of the logits is cut.
        data: the ranks that bring other batches: the mean is over the tokens of all of
            them, and the gradients are this rank's share of that mean's.
    """
    labels = labels_BS.flatten().long()
    count = (labels != IGNORED).sum()
    if tensor is None:
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        flat = logits_BSV.flatten(0, 1).to(wide)
        total = F.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum")
    else:
        total = vocab_parallel_cross_entropy(
            logits_BSV.flatten(0, 1), labels, reduction="sum", group=tensor
        )
    if data is not None:
        dist.all_reduce(count, group=data)
        total = all_reduce_identity(total, data)
    return total / count.clamp(min=1)
