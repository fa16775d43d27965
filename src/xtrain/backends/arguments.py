"""What a call may be given: refused on every rank before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xtrain.backends.calls import shape_of, shapes_of
from xtrain.backends.messages import DTYPE_CODES
from xtrain.backends.observers import OwnDispatch, has_own_dispatch


def served_device() -> str:
    """The type of the device whose tensors a new group takes: the CPU.

    Or the accelerator, where it has its memory on the CPU (a `host_view` in its
    module): as on GPUs, CPU tensors are then foreign.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else getattr(torch, accelerator.type, None)
    return accelerator.type if accelerator and hasattr(module, "host_view") else "cpu"


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of one that is servable."""
    if tensor.is_cpu:
        return tensor
    return torch.get_device_module(tensor.device).host_view(tensor)


def check_servable(
    name: str, backend: str, tensor: Tensor, device: str = "cpu"
) -> None:
    """ValueError unless the tensor is dense memory of the group's device.

    OwnDispatch for a subclass with a `__torch_dispatch__` of its own, as FakeTensor.
    """
    if type(tensor) is not Tensor and has_own_dispatch(tensor):
        raise OwnDispatch(
            f"{name}: {backend} does not serve {type(tensor).__name__} as it stands"
        )
    own = tensor.is_cpu if device == "cpu" else tensor.device.type == device
    if not own or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name}: {backend} serves dense {device.replace('cpu', 'CPU')} tensors, "
            f"got {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype not in DTYPE_CODES or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name}: {backend} does not serve {tensor.dtype}"
            f"{' in a lazy view (use resolve_conj)' * tensor.is_conj()}"
        )


def flatten(tensor: Tensor) -> Tensor:
    """The elements in a row: the tensor's own memory where it is contiguous."""
    tensor = host_view(tensor)
    if type(tensor) is Tensor and tensor.dim() == 1 and not tensor.requires_grad:
        return tensor.contiguous()
    return tensor.detach().contiguous().view(-1)


def check_fits(name: str, size: int, whole: Tensor, part: Tensor) -> None:
    """ValueError unless `whole` has `size` times the elements of `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{name}: {shape_of(whole)} must hold {size} times {shape_of(part)}"
        )


def check_pieces(
    name: str, rank: int, size: int, pieces: Sequence[Tensor], own: Tensor
) -> None:
    """ValueError unless each rank has a piece, and its own looks like `own`."""
    if len(pieces) != size or shape_of(pieces[rank]) != shape_of(own):
        raise ValueError(
            f"{name}: rank {rank} of {size} gave {shapes_of(pieces)} "
            f"for its {shape_of(own)}"
        )


def one_dtype(name: str, tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of all tensors; ValueError when they differ."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"{name}: one call moves one dtype, got {dtypes}")
    return dtypes.pop()


def row_sizes(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Elements for each rank, from rows for each rank (none given: equal ones)."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {rows} rows do not divide by {size} ranks"
            )
        splits = [rows // size] * size
    if sum(splits) != rows or len(splits) != size:
        raise ValueError(
            f"all_to_all_single: splits {list(splits)} for {rows} rows and {size} ranks"
        )
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]
