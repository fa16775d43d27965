"""How many bytes of tensors a part of a program holds at once."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter


class Held:
    """Watches the storages that operators take and return, as long as they live."""

    def __init__(self) -> None:
        self.alive: dict[int, StorageWeakRef] = {}
        self.most = 0

    def note(self, arguments: Any, returned: Any) -> None:
        """An operator that has run."""
        for leaf in tree_iter((arguments, returned)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.alive.setdefault(storage._cdata, StorageWeakRef(storage))
        dead = [place for place, weak in self.alive.items() if weak.expired()]
        for place in dead:
            del self.alive[place]
        self.most = max(self.most, sum(map(size_now, self.alive.values())))


def size_now(weak: StorageWeakRef) -> int:
    """Bytes; some storages are resized, as those of gathered weights are."""
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return 0 if storage is None else storage.nbytes()
