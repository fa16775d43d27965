"""Cross-entropy as a sum over valid tokens, divided once by their count.

Shapes: B batch, S sequence, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def mean_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The mean loss of all tokens whose label is not -100, in at least fp32.

    Without any such token the loss is 0, and so are its gradients.
    """
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    labels = labels_BS.flatten().long()
    total = F.cross_entropy(
        logits_BSV.flatten(0, 1).to(wide), labels, ignore_index=IGNORED, reduction="sum"
    )
    return total / (labels != IGNORED).sum().clamp(min=1)
