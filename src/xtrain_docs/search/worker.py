"""The worker of the search: its files as one, named by what is in it.

Material's page script starts the worker that the configuration of a page names. Ours
takes that place: a browser then loads no other.
"""

import re
import shutil
from pathlib import Path

from ..generated import digest

PARTS = ("words.js", "meaning.js", "ranking.js", "worker.js")
NAMED = re.compile(r"assets/javascripts/workers/search\.\w+\.min\.js")
"""How a page names Material's worker."""


def join_worker(site: Path) -> str | None:
    """Write the worker of a built site and remove Material's; returns its address."""
    folder = site / "assets/search"
    if not folder.is_dir():
        return None
    text = "\n".join((folder / part).read_text() for part in PARTS)
    name = f"assets/search.{digest(text.encode())}.js"
    (site / name).write_text(text)
    shutil.rmtree(folder)
    shutil.rmtree(site / "assets/javascripts/workers", ignore_errors=True)
    return name
