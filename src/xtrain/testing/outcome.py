"""A rank's answer to one job, in a form that fits through a pipe.

An exception is pickled as it is where that works, else as an instance of its nearest
importable base class; its traceback goes along as text.
"""

import pickle
import time
import traceback
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """ "ready", "returned" or "raised", and what came of it.

    `reusable` says that the rank can take another job afterwards; `executed` which of
    the watched symbols it has run.
    """

    kind: str
    value: bytes = b""
    error: bytes = b""
    summary: str = ""
    traceback: str = ""
    at: float = 0.0
    reusable: bool = False
    executed: tuple[str, ...] = ()


def failure(error: BaseException, reusable: bool = False) -> Outcome:
    """Pack an exception that came out of a rank's function."""
    # The first frame is the harness's own call of the function.
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Outcome(
        "raised",
        error=_dump_error(error),
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback=text,
        at=time.monotonic(),
        reusable=reusable,
    )


def load_error(data: bytes) -> BaseException | None:
    """The exception inside `Outcome.error`; None when nothing could be packed."""
    if not data:
        return None
    make, *args = pickle.loads(data)
    return make(*args) if args else make


def _dump_error(error: BaseException) -> bytes:
    try:
        message = str(error)
    except Exception:
        message = f"{type(error).__name__} (its message cannot be shown)"
    candidates: list[tuple[object, ...]] = [(error,)]
    candidates += [(_rebuilt, kind, message) for kind in type(error).__mro__[:-1]]
    for candidate in candidates:
        try:
            data = pickle.dumps(candidate)
            load_error(data)
        except Exception:
            continue
        return data
    return b""


def _rebuilt(kind: type[BaseException], message: str) -> BaseException:
    """An exception of `kind`, made without calling its own __init__."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error
