"""A line for every page that is read, so that a build is not silent for minutes."""

from typing import Any

from mkdocs.plugins import BasePlugin


class Progress(BasePlugin):
    """Prints at once, also into a pipe; generated pages are only counted."""

    def __init__(self) -> None:
        self._read = 0

    def on_page_markdown(
        self, markdown: str, /, *, page: Any, files: Any, **_: Any
    ) -> str:
        """MkDocs calls this with every page before it is rendered."""
        self._read += 1
        name = page.file.src_uri
        if not name.startswith("reference/"):
            total = len(files.documentation_pages())
            print(f"page {self._read} of {total}: {name}", flush=True)
        return markdown
