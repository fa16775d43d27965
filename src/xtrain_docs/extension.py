"""The Markdown extension of the site: `xtrain_docs.extension` in mkdocs.yml."""

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from . import blocks, embed, gallery, math, values

PREPROCESSORS: dict[type[Preprocessor], float] = {
    embed.LinkPreprocessor: 46,
    embed.EmbedPreprocessor: 45,
    values.ValuesPreprocessor: 44,
    blocks.RawPreprocessor: 29.5,
    blocks.BlocksPreprocessor: 29,
    math.DisplayMath: 28,
    blocks.AnchorsPreprocessor: 20.5,
}
"""Their priorities: the highest runs first.

Below 30 Python-Markdown has normalised whitespace, which would break the marks of
stored HTML; at 25 it reads fences, at 21 MkDocs looks for anchors, at 20 raw HTML is
read.
"""


class SiteExtension(Extension):
    """Embeds, computed values, figures and tables, and mathematics."""

    def extendMarkdown(self, md: Markdown) -> None:
        for kind, priority in PREPROCESSORS.items():
            md.preprocessors.register(kind(md), f"xtrain-{kind.__name__}", priority)
        md.inlinePatterns.register(math.InlineMath(math.INLINE, md), "xtrain-math", 185)
        cited = values.CitedInline(values.CITED, md)
        md.inlinePatterns.register(cited, "xtrain-cited", 176)
        bugs = gallery.GalleryTreeprocessor(md)
        md.treeprocessors.register(bugs, "xtrain-gallery", 4)  # the contents are at 5
        md.postprocessors.register(embed.NotePostprocessor(md), "xtrain-notes", 5)


def makeExtension(**options: Any) -> SiteExtension:
    """Called by Python-Markdown."""
    return SiteExtension(**options)
