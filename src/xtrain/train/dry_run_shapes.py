"""What torch does on an accelerator and not on meta: autocast, and fused attention.

    torch.autocast("cpu")           has no kernels for meta: products are cast here
    scaled_dot_product_attention    would keep all scores: FlashAttention keeps none

So forward and backward run by shapes alone as they do on a device with memory. A number
of a tensor is 0 there, see `xtrain.cluster.compute`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = {
    F.linear, F.scaled_dot_product_attention, torch.addmm, torch.baddbmm, torch.bmm,
    torch.einsum, torch.matmul, torch.mm, Tensor.__matmul__, Tensor.addmm, Tensor.bmm,
    Tensor.matmul, Tensor.mm,
}  # fmt: skip
"""What autocast computes in 16 bits, of what models call."""


class Shapes(TorchFunctionMode):
    """Casts where `torch.autocast("cpu")` is on; attention on meta is in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CASTS and torch.is_autocast_enabled("cpu"):
            args = [self.cast(value) for value in args]
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return flash(*args, **kwargs)
        return func(*args, **kwargs)

    def cast(self, value: Any) -> Any:
        """In 16 bits; a weight once, until autocast ends."""
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        lower = torch.get_autocast_dtype("cpu")
        if not (value.is_leaf and value.requires_grad):
            return value.to(lower)
        if id(value) not in self._weights:
            self._weights[id(value)] = value, value.to(lower)
        return self._weights[id(value)][1]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._weights.clear()


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention in blocks, forward and backward."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    found: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask)[0]
    return found
