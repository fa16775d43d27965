"""Where the ranks of a case run: on the virtual cluster; in a page, by replay.

Both count a second for a message, whatever its size.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from xtrain.practice.outcomes import FILE

LIMIT = 5.0
"""Seconds that a rank may run without a call: more is an endless loop."""


if hasattr(torch, "STAND_IN"):
    from xtrain.practice.replay import advance, alone, now, on_ranks, prepared
    from xtrain.practice.replay_kept import kept

    Held: Any = None
else:
    from xtrain.cluster import VirtualCluster, advance, flat, now
    from xtrain.practice.held import Held

    def on_ranks(size: int, program: Callable[..., Any], *args: Any) -> None:
        """Run `program(*args)` on so many ranks."""
        VirtualCluster(size, flat(1.0, 1e15), limit=LIMIT).run(program, *args)

    def kept(form: Any, source: str = "") -> Any:
        """A function of a file, as it is called."""
        return form

    def prepared(source: str) -> CodeType:
        """A file's code, as it is executed."""
        return compile(source, FILE, "exec")

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        """Of a check without ranks."""
        yield


__all__ = ["Held", "advance", "alone", "kept", "now", "on_ranks", "prepared"]
