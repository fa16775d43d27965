"""What autograd keeps of a forward for its backward, in bytes.

::

    with SavedTensors() as saved:
        y = model(x)
    saved.nbytes(but=model.parameters())

Every tensor that autograd saves is looked at, and left as it is. Views of one storage
count once, and the whole storage counts.
"""

from collections.abc import Iterable
from typing import Self

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensors:
    """The storages that autograd saves while it is open.

    They live as long as this does, so that none is freed and its place used again.

    Attributes:
        storages: a tensor of each, by its address.
    """

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # without it a saved output would refer to itself
        self.storages[address(tensor)] = tensor
        return tensor

    def nbytes(self, but: Iterable[Tensor] = ()) -> int:
        """Bytes of all these storages but those of some tensors, such as weights."""
        left_out = {address(tensor) for tensor in but}
        kept = (t for at, t in self.storages.items() if at not in left_out)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def address(tensor: Tensor) -> int:
    """Where its storage begins."""
    return tensor.untyped_storage().data_ptr()
