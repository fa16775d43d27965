"""Packages from npm at build: each by its version and its digest, with the npm client.

What they are made into is kept in build/ between builds. Where the npm client or a
package cannot be had the build prints why and goes on; with XTRAIN_RELEASE=1 it stops.
"""

import base64
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path


def program(name: str = "npm") -> str:
    """The npm client, or what comes with it; FileNotFoundError if there is none."""
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"there is no {name} client")
    return found


def pack(package: str, version: str, place: Path) -> Path:
    """Fetch one package into a folder; returns the archive."""
    made = subprocess.run(
        [program(), "pack", "--silent", f"{package}@{version}"],
        cwd=place, check=True, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return place / made.stdout.split()[-1]


def require(archive: Path, integrity: str) -> None:
    """ValueError unless the archive has the SHA-512 that the registry states."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != integrity:
        raise ValueError(f"{archive.name} has another SHA-512 than the pinned one")


def have(
    fetch: Callable[[], None], error: type[ValueError], what: str, else_: str
) -> bool:
    """Fetch; where that fails, print why it goes on without, or stop a release."""
    try:
        fetch()
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        words = str(getattr(problem, "stderr", "") or problem).strip().splitlines()
        reason = words[-1] if words else type(problem).__name__
        if os.environ.get("XTRAIN_RELEASE", "") not in ("", "0"):
            raise error(f"{what} from npm: {reason}") from problem
        print(f"{else_} ({reason})", flush=True)
        return False
    return True


def settle(fresh: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Put a finished folder in its place, unless another process was here first."""
    try:
        fresh.rename(folder)
    except OSError:
        if not is_whole():
            raise
        shutil.rmtree(fresh)


def copy(folder: Path, files: Iterable[str], target: Path) -> None:
    """Put files of a finished folder into a folder of the built site."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(folder / file, target / file)
