"""Modes that see every call of torch.distributed."""

from typing import Any

ACTIVE: list["TorchDispatchMode"] = []


class Call:
    """An operation as a mode sees it."""

    def __init__(self, name: str, run: Any):
        self._name, self._run = name, run

    def name(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run()


class TorchDispatchMode:
    """While its block runs, `__torch_dispatch__` gets every call."""

    def __enter__(self) -> Any:
        ACTIVE.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        ACTIVE.remove(self)


def called(name: str, args: Any, run: Any) -> Any:
    """Make a call, or have the innermost mode make it."""
    if not ACTIVE:
        return run()
    mode: Any = ACTIVE[-1]
    return mode.__torch_dispatch__(Call(f"c10d::{name}", run), (), args, {})
