"""How functions, arguments and results travel between the parent and its ranks.

Functions go by name, so a rank imports them itself. Tensors go by value, detached
and over the CPU: a result must outlive the rank that made it. They arrive on the
receiver's default device, which is a rank's GPU when it has one.
"""

import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from xtrain.evidence import executed
from xtrain.evidence.executed import Codes


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided:
            return NotImplemented
        if type(obj) is not torch.Tensor:
            return NotImplemented if obj.is_cpu or _has_dispatch(obj) else _moved(obj)
        plain = obj.detach().cpu()
        # A view would carry the whole storage it looks into.
        if plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone()
        return _arrive, plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2]


def _has_dispatch(tensor: torch.Tensor) -> bool:
    """Of a subclass that is not plain memory, as DTensor."""
    plain = torch._C._disabled_torch_dispatch_impl
    return type(tensor).__torch_dispatch__ is not plain


def _moved(tensor: torch.Tensor) -> Any:
    """How a subclass travels that lies on a GPU: over the CPU, where it stays."""
    return tensor.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _arrive(make: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a tensor where the receiver works: its GPU on a rank, else the CPU."""
    return make(*args).to(torch.get_default_device())


def dumps(value: Any) -> bytes:
    """Pickle `value` with its tensors."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call that another process can make: where the function is, and the rest.

    `watched` are symbols, with their code, of which the answer tells whether the call
    ran them.
    """

    name: str
    module: str
    file: str
    pickled: bytes
    watched: Codes = field(default_factory=dict)


def dump_call(
    fn: Callable[..., Any], args: tuple[Any, ...], backend: str, size: int
) -> PackedCall:
    """Pack `fn(*args)` for a World of `size` ranks on `backend`.

    Raises ValueError when `fn` cannot be found by name in another process.
    """
    module = getattr(fn, "__module__", None) or type(fn).__module__
    name = getattr(fn, "__qualname__", repr(fn))
    if "<lambda>" in name or "<locals>" in name:
        raise ValueError(
            f"ranks import the function they run by name, and {module}.{name} has "
            "none: move it to the top level of its module"
        )
    try:
        call = dumps((fn, args))
    except Exception as error:
        raise ValueError(
            f"{module}.{name} and its arguments must be picklable: {error}"
        ) from error
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    seen = executed.current()
    return PackedCall(
        name=f"{module}.{name}",
        module=module,
        file=os.path.abspath(file) if file else "",
        pickled=call,
        watched=seen.missing(backend, size) if seen else {},
    )


def ensure_module(module: str, file: str) -> None:
    """Make `module` importable here as the parent knows it.

    A test file may sit outside sys.path, or share its name with an earlier one.
    """
    if module == "__main__":
        return
    loaded = sys.modules.get(module)
    if loaded is None:
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module or not file:
                raise
    if not file or (loaded and os.path.abspath(loaded.__file__ or "") == file):
        return
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    fresh = importlib.util.module_from_spec(spec)
    sys.modules[module] = fresh
    spec.loader.exec_module(fresh)
