"""Build the site: prebuild, then a strict MkDocs build into a fresh folder.

python -m xtrain_docs.build            publishes to build/site, only on success
python -m xtrain_docs.build --draft    to build/draft; unverified code is marked
                                       instead of stopping the build

It notes what it was made of, so that `make site` spares a build that would change
nothing (`inputs`).
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from xtrain.evidence.closure import steady

from . import config, inputs

ROOT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>xtrain</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="xtrain: distributed training written by hand.">
<meta http-equiv="refresh" content="0; url=en/"><link rel="canonical" href="en/">
</head><body><main><h1>xtrain</h1><p><a href="en/">English</a></p></main></body></html>
"""


def main_config() -> Path:
    """The site's mkdocs.yml."""
    return config.ROOT / "mkdocs.yml"


def _quiet_kernels() -> None:
    """Give the labs' kernels a profile of their own that keeps to errors."""
    profile = config.BUILD / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    kernel = profile / "ipython_kernel_config.py"
    kernel.write_text("c.IPKernelApp.log_level = 40\n")
    os.environ["IPYTHONDIR"] = str(profile.parent)
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    paths = [str(config.SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _site_address() -> None:
    """XTRAIN_SITE_URL names the root of the site; the English pages are one below."""
    root = os.environ.pop("XTRAIN_SITE_URL", "").rstrip("/")
    if root:
        os.environ["XTRAIN_SITE_URL"] = f"{root.removesuffix('/en')}/en/"


def has(site: Path, tag: str) -> bool:
    """Does any page have this element, which runs Python in the browser?"""
    return any(f"<{tag}" in page.read_text() for page in site.rglob("*.html"))


def build(target: Path) -> None:
    """Prebuild and build into `target`; raises on any error or warning.

    A draft build goes on after warnings, such as links to pages not yet written.
    """
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    os.environ.setdefault("DISABLE_MKDOCS_2_WARNING", "true")
    _quiet_kernels()
    _site_address()
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    from . import drill_pages, kept, licences, prebuild, publish, pyodide
    from .progress import Progress
    from .search.index import SearchIndex

    prebuild.main()
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    loaded = load_config(
        str(main_config()), site_dir=str(fresh / "en"), strict=not config.draft()
    )
    loaded.plugins["xtrain/progress"] = Progress()
    loaded.plugins["xtrain/search"] = SearchIndex()
    loaded.plugins.on_startup(command="build", dirty=False)
    try:
        mkdocs_build(loaded)
    finally:
        loaded.plugins.on_shutdown()
    licences.write_licences(fresh / "en")
    has_drills = has(fresh / "en", "xtrain-drill")
    if has_drills:
        drill_pages.write(fresh / "en")
    if has_drills or has(fresh / "en", "xtrain-calculator"):
        pyodide.write(fresh / "en")
    publish.publish(fresh / "en")
    kept.note_asked()
    (fresh / "index.html").write_text(ROOT_PAGE)
    shutil.copyfile(fresh / "en" / "404.html", fresh / "404.html")
    (fresh / ".nojekyll").touch()
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.build")
    parser.add_argument("--draft", action="store_true", help="mark unverified code")
    parser.add_argument("--to", type=Path, help="another folder to publish to")
    options = parser.parse_args(arguments)
    if options.draft:
        os.environ["XTRAIN_DOCS_DRAFT"] = "1"
    target = config.BUILD / "draft" if config.draft() else config.SITE
    target = options.to.resolve() if options.to else target
    began = time.perf_counter()
    before = inputs.state()
    import logging

    from mkdocs.exceptions import MkDocsException

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        with steady():
            build(target)
    except (MkDocsException, ValueError) as problem:
        print(f"\nsite not built: {problem}", file=sys.stderr)
        return 1
    inputs.save(target, before)
    took = time.perf_counter() - began
    print(f"site built in {took:.1f} s: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
