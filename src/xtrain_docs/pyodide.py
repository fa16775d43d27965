"""Python for the browser: Pyodide, from npm at build, pinned by its digest.

    npm pack -> build/pyodide/ -> the files that are needed -> assets/pyodide/

It is not in the repository, and a page loads it only when a reader asks a calculator
something. Where the npm client or the package cannot be had the build says so, and the
calculators show the answers they were built with; with XTRAIN_RELEASE=1 the build stops
instead.

Beside it lies `xtrain.zip`: the torch-free parts of the package and the calculators,
the very files that the tests run.
"""

import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from . import config, npm

VERSION = "314.0.7"
INTEGRITY = (
    "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsO"
    "lD2R1A=="
)
"""SHA-512 of the package, as the registry states it."""
LOCK = "pyodide-lock.json"
FILES = (
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", LOCK
)  # fmt: skip
NOTICE = """\
Pyodide {version}, unmodified, from the npm package "pyodide".
Mozilla Public License 2.0: https://www.mozilla.org/MPL/2.0/
Source: https://github.com/pyodide/pyodide
It contains CPython and its standard library, under the PSF License Agreement:
https://docs.python.org/3/license.html
"""
PACKED = ("xtrain/plan", "xtrain/schedules", "xtrain_docs/calculators")


class MissingPyodide(ValueError):
    """A release needs Pyodide, and it cannot be had. Stops the build."""


def folder() -> Path:
    """Where the files of this version are kept between builds."""
    return config.BUILD / "pyodide" / VERSION


def is_whole() -> bool:
    """Are all files there?"""
    return all((folder() / file).is_file() for file in FILES)


@cache
def is_ready() -> bool:
    """Are the files there, fetched now if need be? Says why not, once."""
    without = "calculators: without Python for the browser"
    return is_whole() or npm.have(fetch, MissingPyodide, f"Pyodide {VERSION}", without)


def fetch() -> None:
    """Fetch the package with the npm client, check its digest, keep what is needed."""
    npm.program()
    place = folder().with_name(f"{VERSION}.new.{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    archive = npm.pack("pyodide", VERSION, place)
    unpack(archive, place)
    archive.unlink()
    npm.settle(place, folder(), is_whole)


def unpack(archive: Path, place: Path, integrity: str = INTEGRITY) -> None:
    """The needed files of the package; ValueError if it is not the pinned one."""
    npm.require(archive, integrity)
    with tarfile.open(archive) as package:
        for file in FILES:
            member = package.extractfile(f"package/{file}")
            if member is None:
                raise ValueError(f"{archive.name} has no {file}")
            (place / file).write_bytes(member.read())


def write(site: Path) -> None:
    """Put Pyodide, its notice and our own modules into the built site."""
    if not is_ready():
        return
    target = site / "assets" / "pyodide"
    npm.copy(folder(), FILES, target)
    lock = json.loads((folder() / LOCK).read_text())
    (target / LOCK).write_text(json.dumps({**lock, "packages": {}}))  # none is shipped
    (target / "NOTICE.txt").write_text(NOTICE.format(version=VERSION))
    pack(target / "xtrain.zip")


def pack(archive: Path) -> None:
    """What calculators run, as one archive."""
    files = [config.SOURCE / name / "__init__.py" for name in ("xtrain", "xtrain_docs")]
    for part in PACKED:
        files += sorted((config.SOURCE / part).rglob("*.py"))
    of_the_build = config.SOURCE / "xtrain_docs/calculators/element.py"
    pack_files(archive, [file for file in files if file != of_the_build])


def pack_files(
    archive: Path, files: Iterable[Path], changed: dict[str, str] | None = None
) -> None:
    """Files below src as one archive, the same bytes whenever it is made.

    Args:
        changed: other contents for some of them, by name.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            name = file.relative_to(config.SOURCE).as_posix()
            text = (changed or {}).get(name)
            content = file.read_bytes() if text is None else text.encode()
            packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
