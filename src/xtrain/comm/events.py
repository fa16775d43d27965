"""Event: one communication call, as the rank that made it saw it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One communication call as one rank saw it."""

    rank: int
    """Global rank that made the call."""
    kind: str
    """"send", "recv" or "collective"."""
    op: str
    """Name of the call: "send", "recv", or the collective's."""
    peer: int | None
    """Global rank at the other end; None for a collective and for receive-from-any."""
    payload: int
    """Bytes of the tensors handed to the call."""
    nbytes: int | None
    """Bytes this rank sent (for a receive: received) for it; None if only the backend
    knows."""
    round: int
    """Calls of one round were issued together, before any of them was waited for."""
    values: tuple[float, ...] | None = None
    """The values sent, where the ledger keeps them."""
    received: int | None = None
    """Bytes this rank received for a collective, where the backend tells."""
