"""Bytes of what operations make, for as long as it is there.

::

    with LiveStorages(known=model.parameters()) as live:
        model(x).backward()
    live.most

A storage is counted from the operation that makes it until the last reference is gone.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The storages that were made while it is open, and those known before.

    Attributes:
        now: bytes of those that are there.
        most: the most there were at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in known:
            self.add(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the compiler: seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return made

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def nbytes(self, but: Iterable[Tensor] = ()) -> int:
        """Bytes that are there now, without the storages of some tensors."""
        left_out = {tensor.untyped_storage()._cdata for tensor in but}
        return self.now - sum(self.sizes.get(key, 0) for key in left_out)
