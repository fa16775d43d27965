"""What the operations inside make: their largest tensor, and the work of products."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Follows all operations while it is open.

    Attributes:
        elements, nbytes: of the largest tensor that any of them made.
        flops: of all products of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.nbytes = self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the compiler: seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.flops += 2 * made.numel() * args[0].shape[-1]
        return made
