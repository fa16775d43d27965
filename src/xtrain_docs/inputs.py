"""What a build was made of, so that the next one knows whether it can be spared.

    python -m xtrain_docs.inputs      exit status 0, and a line that says so, when the
                                      site stands and what it was made of is as it was

    build/site.inputs.json    {"files": {"docs/en/index.md": digest, ...},
                               "folders": {"docs/en": digest of the names in it, ...},
                               "around": digest of the versions and settings}

Nobody keeps a list: a build watches itself. Python reports to an audit hook every file
that is opened and every folder that is listed. Of those in the repository, what the
build read counts; a file that it looked for and did not find counts, too. The packages
count with their versions. Ranks and the kernel of the lab are other processes, but they
run code of ours, all of which the build reads to show it.

Standard library only, so that to ask takes no time.
"""

import hashlib
import json
import os
import platform
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from . import config

READ_FOLDER = ("os.listdir", "os.scandir")
ABSENT = ""


class Watch:
    """Notes what this process reads below the repository, until `save`.

    Args:
        target: the folder of the site; what is written there is no input.
        folders: what would be read, too, if there were such folders.
    """

    def __init__(self, target: Path, *folders: Path) -> None:
        self.files: dict[str, int] = {}  # path -> when it had last been changed then
        self.folders = {str(folder) for folder in folders}
        self.written: set[str] = set()
        self._root = f"{config.ROOT}{os.sep}"
        downloads = f"{config.BUILD}/pyodide{os.sep}"  # npm's, of a pinned version
        self._outside = (
            f"{target}", f"{sys.prefix}{os.sep}", f"{config.ROOT}/.git/", downloads
        )  # fmt: skip
        self._around = around()  # now: a build changes its environment
        self._listening = True
        sys.addaudithook(self._hear)  # Python has no way to remove one

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._listening:
            return
        if event == "open" and (path := self._ours(arguments[0])):
            mode, flags = arguments[1:]
            changes = set(mode) & set("wax+") if mode else flags & os.O_ACCMODE
            if changes:
                self.written.add(path)
            elif path not in self.files:
                self.files[path] = changed_at(path)
        elif event in READ_FOLDER and (path := self._ours(arguments[0] or ".")):
            self.folders.add(path)
        elif event == "os.rename" and (path := self._ours(arguments[1])):
            self.written.add(path)

    def _ours(self, path: Any) -> str | None:
        if not isinstance(path, str | os.PathLike):
            return None  # an open file's number
        found = os.path.abspath(path)
        if not found.startswith(self._root) or found.startswith(self._outside):
            return None
        return None if "__pycache__" in found else found

    def save(self, note: Path) -> None:
        """Write what was read; nothing if some of it was edited while it was read."""
        self._listening = False
        for module in list(sys.modules.values()):  # imported before, or from bytecode
            file = getattr(module, "__file__", None)
            if file and os.path.isabs(file) and (path := self._ours(file)):
                self.files.setdefault(path, changed_at(path))
        edited = {file for file, at in self.files.items() if changed_at(file) != at}
        note.unlink(missing_ok=True)
        if edited <= self.written:  # a page that the build itself made anew
            seen = {
                "files": {_short(file): file_digest(file) for file in self.files},
                "folders": {_short(one): folder_digest(one) for one in self.folders},
                "around": self._around,
            }
            note.write_text(json.dumps(seen, indent=1, sort_keys=True))


def place(target: Path) -> Path:
    """The file that says what the site at `target` was made of."""
    return target.with_name(f"{target.name}.inputs.json")


def differences(target: Path) -> list[str]:
    """What has changed since the site at `target` was built; `all` when none stands."""
    if not place(target).is_file() or not (target / "index.html").is_file():
        return ["all"]
    known = json.loads(place(target).read_text())
    found = ["versions or settings"] if known["around"] != around() else []
    for kind, digest in (("files", file_digest), ("folders", folder_digest)):
        found += [
            name
            for name, before in known[kind].items()
            if digest(config.ROOT / name) != before
        ]
    return found


def around() -> str:
    """A digest of this Python, this machine, all packages, and our variables."""
    packages = sorted(f"{one.name} {one.version}" for one in distributions())
    ours = sorted(item for item in os.environ.items() if item[0].startswith("XTRAIN_"))
    machine = (sys.version, platform.platform(), os.cpu_count(), str(config.ROOT))
    return _digest(repr((machine, packages, ours)).encode())


def file_digest(path: str | Path) -> str:
    """A digest of what is in a file; ABSENT when there is none."""
    try:
        return _digest(Path(path).read_bytes())
    except OSError:
        return ABSENT


def folder_digest(path: str | Path) -> str:
    """A digest of the names in a folder, hidden ones left out."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ABSENT
    seen = (name for name in names if name[0] != "." and name != "__pycache__")
    return _digest("\0".join(seen).encode())


def changed_at(path: str) -> int:
    """When a file was last changed; 0 when there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _short(path: str) -> str:
    return Path(path).relative_to(config.ROOT).as_posix()


def main() -> int:
    """0 when the site can stay as it is."""
    if differences(config.SITE):
        return 1
    print("the site stands: nothing it was made of has changed since it was built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
