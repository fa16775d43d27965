"""Where things are, and the few settings a build reads from its environment."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository: the site is built from a checkout (or an editable install)."""

SOURCE = ROOT / "src"
PAGES = ROOT / "docs" / "en"
BUILD = ROOT / "build"
COMMITTED_RECORDS = ROOT / "docs" / "data" / "verification"
RECORDS = (BUILD / "verification", COMMITTED_RECORDS)
"""Folders of verification records: what the last test run wrote, and what travels with
the code (`make record`), from machines with GPUs too."""

SITE = BUILD / "site"

VERIFY_COMMAND = "make test"
"""The command that writes the verification record."""


def source_url(path: str, first: int, last: int) -> str:
    """The address of lines `first` to `last` of a source file.

    Set XTRAIN_SOURCE_URL to a template with {path}, {first} and {last} to point at
    a public repository; the default is the page of that file in this site.
    """
    template = os.environ.get("XTRAIN_SOURCE_URL")
    if not template:
        return f"/source/{path.removeprefix('src/')}.md#L{first}"
    return template.format(path=path, first=first, last=last)


def draft() -> bool:
    """Is this a draft build, which shows unverified code instead of stopping?"""
    return os.environ.get("XTRAIN_DOCS_DRAFT", "") not in ("", "0")


def draft_note(problem: Exception) -> list[str]:
    """In a draft: the problem as a box on the page. Otherwise it stops the build."""
    if not draft():
        raise problem
    return ["", '!!! danger "This stops the real build"', "", f"    {problem}", ""]
