"""A name for every call, so that ranks that disagree can be told apart.

Before a collective touches data, its ranks compare fingerprints: operation, shape,
dtype, reduce operation, root, and, for the symmetric ones, the line that called. Ranks
that stand in different calls would otherwise add up bytes that do not belong together,
and no one would know.
"""

import hashlib
import os
import sys
from functools import lru_cache
from types import FrameType

# Modules between the line `dist.all_reduce(x)` and this backend.
_BETWEEN = (
    "xtrain.backends.",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
)
_LIBRARIES = ("torch.", "xtrain.", "contextlib")


def call_site() -> tuple[str, bool]:
    """ "file:line" of the innermost frame outside torch and xtrain.

    And whether that line itself calls torch.distributed. A library may have its own
    reasons to call from two places at once: DDP's join, for ranks out of inputs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).startswith(_BETWEEN):
        frame = frame.f_back
    caller = frame
    while frame is not None and module_of(frame).startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return "?", False
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", frame is caller


def module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


@lru_cache(maxsize=4096)
def fingerprint(call: str, site: str) -> int:
    """64 bits that differ for different calls, equal in every process.

    Of the file only the name counts: other hosts may keep it in another folder.
    """
    line = os.path.basename(site)
    digest = hashlib.blake2b(f"{call}\0{line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
