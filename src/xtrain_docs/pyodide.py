"""Python for the browser: Pyodide, from npm at build, pinned by its digest.

    npm pack -> build/pyodide/ -> the files that are needed -> assets/pyodide/

It is not in the repository, and a page loads it only when a reader asks a calculator
something. Where the npm client or the package cannot be had the build says so, and the
calculators show the answers they were built with; with XTRAIN_RELEASE=1 the build stops
instead.

Beside it lies `xtrain.zip`: the torch-free parts of the package and the calculators,
the very files that the tests run.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from . import config

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
    if is_whole():
        return True
    try:
        fetch()
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        words = str(getattr(problem, "stderr", "") or problem).strip().splitlines()
        reason = words[-1] if words else type(problem).__name__
        if os.environ.get("XTRAIN_RELEASE", "") not in ("", "0"):
            raise MissingPyodide(f"Pyodide {VERSION} from npm: {reason}") from problem
        print(f"calculators: without Python for the browser ({reason})", flush=True)
        return False
    return True


def fetch() -> None:
    """Fetch the package with the npm client, check its digest, keep what is needed."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("there is no npm client")
    place = folder().with_name(f"{VERSION}.new.{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run(
        [npm, "pack", "--silent", f"pyodide@{VERSION}"],
        cwd=place, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    archive = place / f"pyodide-{VERSION}.tgz"
    unpack(archive, place)
    archive.unlink()
    try:
        place.rename(folder())
    except OSError:
        if not is_whole():
            raise
        shutil.rmtree(place)  # another process was here first


def unpack(archive: Path, place: Path, integrity: str = INTEGRITY) -> None:
    """The needed files of the package; ValueError if it is not the pinned one."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != integrity:
        raise ValueError(f"{archive.name} has another SHA-512 than the pinned one")
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
    target.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        shutil.copyfile(folder() / file, target / file)
    lock = json.loads((folder() / LOCK).read_text())
    (target / LOCK).write_text(json.dumps({**lock, "packages": {}}))  # none is shipped
    (target / "NOTICE.txt").write_text(NOTICE.format(version=VERSION))
    pack(target / "xtrain.zip")


def pack(archive: Path) -> None:
    """Our modules as one archive, the same bytes whenever it is made."""
    files = [config.SOURCE / name / "__init__.py" for name in ("xtrain", "xtrain_docs")]
    for part in PACKED:
        files += sorted((config.SOURCE / part).rglob("*.py"))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            name = file.relative_to(config.SOURCE).as_posix()
            if name != "xtrain_docs/calculators/element.py":  # of the build alone
                packed.writestr(zipfile.ZipInfo(name), file.read_bytes())
