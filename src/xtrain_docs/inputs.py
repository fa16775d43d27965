"""The inputs of a build, to decide whether the next one can be skipped.

    python -m xtrain_docs.inputs      exit status 0, and a line that says so, when the
                                      site stands and what it was made of is as it was

    build/site.inputs.json    {"docs/en/index.md": digest, ...}

Every file of the repository counts but hidden ones and those that a .gitignore names.
So do the records of tests that ran here, the packages' versions, and settings.

Standard library only, so that to ask takes no time.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from . import config
from .generated import digest

AROUND = "versions or settings"


def state() -> dict[str, str]:
    """A digest of everything that a build could read, by name."""
    records = (file for folder in config.RECORDS for file in folder.glob("*.json"))
    files = sorted({*_listed(config.ROOT, ()), *records})
    names = {path.relative_to(config.ROOT).as_posix(): path for path in files}
    found = {name: digest(path.read_bytes(), 16) for name, path in names.items()}
    return {AROUND: around(), **found}


def _listed(folder: Path, ignored: tuple[str, ...]) -> Iterator[Path]:
    """The files below a folder that no .gitignore names."""
    note = folder / ".gitignore"
    for line in note.read_text().splitlines() if note.is_file() else ():
        if line and not line.startswith("#"):
            below = f"{folder}{line}" if line.startswith("/") else line
            ignored = (*ignored, below.rstrip("/"))
    for path in folder.iterdir():
        if path.name.startswith(".") or any(map(path.match, ignored)):
            continue
        if path.is_dir():
            yield from _listed(path, ignored)
        elif path.is_file():
            yield path


def around() -> str:
    """A digest of this Python, this machine, all packages, and our variables."""
    packages = sorted(f"{one.name} {one.version}" for one in distributions())
    ours = sorted(item for item in os.environ.items() if item[0].startswith("XTRAIN_"))
    machine = (sys.version, platform.platform(), os.cpu_count(), str(config.ROOT))
    return digest(repr((machine, packages, ours)).encode(), 16)


def place(target: Path) -> Path:
    """The file with the inputs of the site at `target`."""
    return target.with_name(f"{target.name}.inputs.json")


def save(target: Path, before: dict[str, str]) -> None:
    """Note the state from before a build; none if a file was edited since."""
    place(target).unlink(missing_ok=True)
    if state() | {AROUND: ""} == before | {AROUND: ""}:  # a build sets variables
        place(target).write_text(json.dumps(before, indent=1))


def differences(target: Path) -> list[str]:
    """What has changed since the site at `target` was built; `all` if it was not."""
    if not place(target).is_file() or not (target / "index.html").is_file():
        return ["all"]
    before, now = json.loads(place(target).read_text()), state()
    names = sorted({*before, *now})
    return [name for name in names if before.get(name) != now.get(name)]


def main() -> int:
    """0 when the site can stay as it is."""
    if differences(config.SITE):
        return 1
    print("the site stands: nothing it was made of has changed since it was built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
