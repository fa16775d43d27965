"""Look at the processes of this machine, through /proc."""

import time
from collections.abc import Callable
from pathlib import Path


def session(sid: int) -> list[int]:
    """Ids of the living processes in a session, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            fields = _fields(folder)
            if fields[0] not in "Z-" and int(fields[3]) == sid:
                found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _fields(Path(f"/proc/{pid}"))[0] not in "Z-"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll `condition`; AssertionError when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def _fields(folder: Path) -> list[str]:
    """The fields after the name in /proc/PID/stat; "-" for one that is gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["-", "0", "0", "0"]
