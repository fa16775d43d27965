"""The site's own Python: Markdown extensions, prebuild, figures.

It imports xtrain, never the other way round. Nothing here is a MkDocs hook: the
extensions are plain Python-Markdown, so another site generator can run them.
"""
