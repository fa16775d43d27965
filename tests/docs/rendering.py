"""Markdown as the site renders it, less the plugins of MkDocs."""

import html
import re
from typing import Any

import markdown
import yaml

from xtrain_docs import config, fences, values
from xtrain_docs.amounts import NO_BREAK

EXTENSIONS = [
    "abbr", "admonition", "attr_list", "def_list", "footnotes", "md_in_html", "tables",
    "toc", "pymdownx.details", "pymdownx.highlight", "pymdownx.inlinehilite",
    "pymdownx.superfences", "pymdownx.tabbed", "xtrain_docs.extension",
]  # fmt: skip
OPTIONS = {"pymdownx.tabbed": {"alternate_style": True}}


def render(text: str) -> str:
    """The HTML of a page's Markdown."""
    return markdown.Markdown(extensions=EXTENSIONS, extension_configs=OPTIONS).convert(
        text
    )


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name environment variables."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def site_settings() -> dict[str, Any]:
    """What mkdocs.yml sets."""
    return yaml.load((config.ROOT / "mkdocs.yml").read_text(), Loader)


def page_rows(page: str, header: str) -> list[list[str]]:
    """The cells of the one table on a page whose header begins so, computed.

    An empty first cell of the header does not count.
    """
    lines = (config.PAGES / page).read_text().splitlines()
    lines = fences.replace(lines, values.rows)
    (start,) = (
        i for i, line in enumerate(lines)
        if line.startswith("|") and line.lstrip("| ").startswith(header)
    )  # fmt: skip
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        text = html.unescape(re.sub("<[^>]+>", "", values.filled(line)))
        text = text.replace(NO_BREAK, " ")
        rows.append([cell.strip() for cell in text.strip("|").split(" | ")])
    return rows
