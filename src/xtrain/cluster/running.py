"""The cluster that runs in this process now: there is one at most."""

from typing import Any

_now: list[Any] = []


def cluster() -> Any:
    """The cluster that runs, a `VirtualCluster`; None between runs."""
    return _now[-1] if _now else None


def begin(cluster: Any) -> None:
    """RuntimeError when one runs already."""
    if _now:
        raise RuntimeError("a virtual cluster runs already in this process")
    _now.append(cluster)


def end() -> None:
    _now.clear()
