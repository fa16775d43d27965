# mypy: disable-error-code="override,assignment,call-arg,misc"
"""The names of a group in Python: its backend, its device, its ranks."""

import torch
import torch.distributed as dist


class NamedGroup(dist.ProcessGroup):
    """What torch asks a group about itself."""

    def __init__(self, backend: str, rank: int, size: int, device: str = "cpu"):
        super().__init__(rank, size)
        self._backend_name, self._rank, self._size = backend, rank, size
        self._device = device  # the type of the tensors that it takes
        self._names: dict[str, str] = {}
        self._global_ranks: list[int] = []
        self.cpp_group = dist.ProcessGroup(rank, size)  # see `operators`

    def getBackendName(self) -> str:
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device)]

    # torch asks the backend of a device what it can do; here it is the group itself.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> "NamedGroup":
        if torch.device(device).type != self._device:
            raise RuntimeError(
                f"{self._backend_name} has no backend for device type {device}"
            )
        return self

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names.get("name", "")

    def setGroupDesc(self, description: str) -> None:
        self._names["desc"] = description

    def getGroupDesc(self) -> str:
        return self._names.get("desc", "")

    @property
    def group_name(self) -> str:
        return self.getGroupName()

    @property
    def group_desc(self) -> str:
        return self.getGroupDesc()

    def _global_rank(self, rank: int) -> int:
        """The rank in the default group of a rank of this group."""
        if not self._global_ranks:
            try:
                self._global_ranks = dist.get_process_group_ranks(self)
            except (KeyError, ValueError, RuntimeError):
                return rank  # torch has not registered this group (yet)
        return self._global_ranks[rank]
