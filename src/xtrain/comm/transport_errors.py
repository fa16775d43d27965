"""Errors of a transport: how to tell them, and which ranks they name."""

import re
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import FOLDERS
from xtrain.comm.checks import group_or_world

PLACE_IN_GLOO = re.compile(r"^\[[^\]]*\]\s*")
AFTER_A_TIMEOUT = "Application timeout caused pair closure"
"""Of gloo, in any call with a rank after one that has timed out."""


class PeersLost(RuntimeError):
    """A call of a backend failed because of other ranks.

    `ranks`: global ranks of processes that ended, left the group or are stopped, as far
    as the backend can tell.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()):
        super().__init__(text)
        self.ranks = tuple(ranks)


def is_of_transport(error: BaseException) -> bool:
    """Whether it is from a backend, which lost a rank or waited too long for one."""
    if isinstance(error, (PeersLost, dist.DistError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo/" in text or text.startswith(AFTER_A_TIMEOUT)


def is_timeout(error: BaseException) -> bool:
    """Whether a backend waited too long: as far as it knows, no rank has ended."""
    return is_of_transport(error) and "timed out" in str(error).lower()


def in_short(error: BaseException) -> str:
    """An error's first sentence, without gloo's line of source and a path's folders."""
    text = FOLDERS.sub("", PLACE_IN_GLOO.sub("", str(error)))
    return re.split(r"\. |\n", text)[0].removesuffix(".")


class MessageWork:
    """The work of a message, whose errors name its call and the other rank."""

    def __init__(self, work: dist.Work, call: str, rank: int):
        self._work, self._call, self._rank = work, call, rank

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            if not is_of_transport(error):
                raise
            text = f"{self._call} with rank {self._rank}: {in_short(error)}"
            raise PeersLost(text, getattr(error, "ranks", ())) from error


def naming_peers(
    works: list[dist.Work], call: str, peers: list[int], group: ProcessGroup | None
) -> list[Any]:
    """The works of messages, each with its peer; as they are if some are one batch."""
    if len(works) != len(peers):
        return works
    ranks = dist.get_process_group_ranks(group_or_world(group))
    return [
        MessageWork(work, call, ranks[peer])
        for work, peer in zip(works, peers, strict=True)
    ]
