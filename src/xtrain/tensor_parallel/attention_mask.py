"""Causal attention within a sliding window, and within packed documents.

    causal       a token sees itself and the tokens before it
    window w     and of those itself and the w - 1 before it
    documents    and of those the ones of its own document

Sources: Jiang et al., Mistral 7B, 2023 (windows); Grattafiori et al., The Llama 3 Herd
of Models, 2024 (masks between packed documents).

Shapes: B batch, N query heads, K key/value heads, S sequence, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_mask(
    length: int,
    window: int | None = None,
    documents: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each query sees: [S, S], or [B, 1, S, S] with documents.

    Args:
        documents: [B, S], the number of each token's document. A negative one is
            padding, which sees nothing and is never seen.
    """
    place = torch.arange(length, device=device)
    distance = place.unsqueeze(-1) - place
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if documents is not None:
        own = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        seen = (seen & own & (documents >= 0).unsqueeze(-1)).unsqueeze(1)
    return seen


def scaled_dot_product_attention(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    is_causal: bool = True,
    enable_gqa: bool = True,
    dropout_p: float = 0.0,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Torch's, which has neither windows nor documents; they are causal.

    A token that sees nothing gets zeros.
    """
    mask = None
    if window is not None or documents is not None:
        if not is_causal:
            raise ValueError("window and documents are for is_causal=True")
        mask = attention_mask(q_BNSD.shape[2], window, documents, q_BNSD.device)
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal and mask is None,
        enable_gqa=enable_gqa,
    )


def check_window(window: int | None) -> None:
    """ValueError unless it is None or a number of tokens."""
    whole = isinstance(window, int) and not isinstance(window, bool)
    if window is not None and not (whole and window > 0):
        raise ValueError(f"window={window!r} is not a number of tokens above 0")
