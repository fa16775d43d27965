"""The drills that can be written in the page, by lecture, as one element."""

from dataclasses import dataclass

from ... import drill_pages
from ...tables import REGISTRY


@dataclass(frozen=True)
class Desk:
    """A block of a page that is HTML, of one line."""

    html: str

    def markdown(self) -> list[str]:
        return [self.html]


@REGISTRY
def drills_in_page() -> Desk:
    """The element that `drill.mjs` brings to life."""
    return Desk(drill_pages.element())
