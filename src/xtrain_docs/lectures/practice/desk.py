"""The drills that can be written in the page, by lecture, as one element."""

from ... import drill_pages
from ...tables import REGISTRY


@REGISTRY
def drills_in_page() -> list[str]:
    """The element that `drill.mjs` brings to life."""
    return [drill_pages.element()]
