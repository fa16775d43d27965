"""Look at the processes of this machine, through /proc."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def asleep(pid: int) -> bool:
    """Whether a process waits for something, in its main thread."""
    return _fields(Path(f"/proc/{pid}"))[0] == "S"


def wait_until(
    condition: Callable[[], Any], seconds: float = 20.0, what: str = "it"
) -> Any:
    """Poll `condition` for its first true value; AssertionError when it has none."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)
    return found


def _fields(folder: Path) -> list[str]:
    """The fields after the name in /proc/PID/stat; "-" for one that is gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["-", "0", "0", "0"]
