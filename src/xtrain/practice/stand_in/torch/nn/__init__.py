"""Of torch.nn what files of the drills name; modules with gradients are not here."""

from typing import Any

from torch.nn import functional as functional
from torch.nn import utils as utils
from torch.tensors import Tensor


class Module:
    """A class to inherit from."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]


class Linear(Module):
    """Refused when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("torch.nn.Linear cannot be had in a page")


ModuleList = Sequential = Embedding = Linear


def Parameter(data: Tensor, requires_grad: bool = True) -> Tensor:
    """The tensor itself."""
    return data
