"""Markdown as the site renders it, less the plugins of MkDocs."""

import markdown

EXTENSIONS = [
    "abbr", "admonition", "attr_list", "def_list", "footnotes", "md_in_html", "tables",
    "toc", "pymdownx.details", "pymdownx.highlight", "pymdownx.inlinehilite",
    "pymdownx.superfences", "pymdownx.tabbed", "xtrain_docs.embed",
    "xtrain_docs.values", "xtrain_docs.blocks", "xtrain_docs.math",
]  # fmt: skip
OPTIONS = {"pymdownx.tabbed": {"alternate_style": True}}


def render(text: str) -> str:
    """The HTML of a page's Markdown."""
    return markdown.Markdown(extensions=EXTENSIONS, extension_configs=OPTIONS).convert(
        text
    )
