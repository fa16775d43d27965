"""What a call returns that is still under way: wait for its messages, then finish."""

from collections.abc import Callable, Iterable
from typing import Any


class Work:
    """A call under way: `wait()` returns when its outputs are filled.

    Until then neither its inputs nor its outputs may be touched; this keeps them alive.
    Waiting twice is a no-op.

    Args:
        works: what `wait` waits for, in order; none for a call that is over.
        finish: what is left to do then.
        keep: tensors, or works, that must live until then.
    """

    def __init__(
        self,
        works: Iterable[Any] = (),
        finish: Callable[[], object] | None = None,
        keep: object = None,
    ):
        self._works, self._finish, self._keep = list(works), finish, keep

    def wait(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]
        # Nothing is kept while it finishes, which may need the memory.
        finish, self._finish, self._keep = self._finish, None, None
        if finish is not None:
            finish()

    def abandon(self) -> None:
        """Wait for all messages and leave `finish` out: the result is unused."""
        self._finish = None
        self.wait()
