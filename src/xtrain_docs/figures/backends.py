"""The backends' races as a drawing."""

from . import REGISTRY
from .races import lc1_race


@REGISTRY
def backends_race(race: str, ranks: int = 4, only: str = "") -> str:
    """How many times as fast as gloo the backends are, by size."""
    return lc1_race(race, ranks, only, record="backends")
