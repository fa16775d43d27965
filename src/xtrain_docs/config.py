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
    """Where the repository that XTRAIN_REPO_URL names shows lines of a file, or ""."""
    repository = os.environ.get("XTRAIN_REPO_URL", "").rstrip("/")
    return f"{repository}/blob/main/{path}#L{first}-L{last}" if repository else ""


def draft() -> bool:
    """Is this a draft build, which shows unverified code instead of stopping?"""
    return os.environ.get("XTRAIN_DOCS_DRAFT", "") not in ("", "0")


def draft_note(problem: Exception) -> list[str]:
    """In a draft: the problem as a box on the page. Otherwise it stops the build."""
    if not draft():
        raise problem
    return ["", '!!! danger "This stops the real build"', "", f"    {problem}", ""]
