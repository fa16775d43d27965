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
    number: int
    """How many calls this rank had recorded before."""
    done: int | None = None
    """Of a message: how many calls this rank had recorded when it had waited for it;
    None as long as it has not."""
    values: tuple[float, ...] | None = None
    """The values sent, where the ledger keeps them."""
    received: int | None = None
    """Bytes this rank received for a collective, where the backend tells."""
