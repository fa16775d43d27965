"""What a reader has started and solved, kept in one file of his own.

$XTRAIN_STATE/drills.json, else $XDG_STATE_HOME/xtrain, else ~/.local/state/xtrain
"""

import json
import os
import time
from pathlib import Path
from typing import Any


def file() -> Path:
    """Where it is kept."""
    own = os.environ.get("XTRAIN_STATE")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return (Path(own) if own else Path(state) / "xtrain") / "drills.json"


def read() -> dict[str, dict[str, Any]]:
    """By drill; empty if there is nothing.

    Raises ValueError, with the path, for a file that is not ours.
    """
    path = file()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{path} is not a file of drills: move it away") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a file of drills: move it away")
    return found


def note(name: str, **values: Any) -> dict[str, Any]:
    """Keep these values of a drill; all of it, as it is then."""
    known = read()
    known[name] = {**known.get(name, {}), **values}
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
    return known[name]


def started(name: str, level: str) -> None:
    """The clock of a drill begins anew."""
    note(name, level=level, started=time.time(), hints=0)


def checked(name: str, right: bool) -> float | None:
    """Count a check; seconds since the start, if it is the first that is right."""
    known = read().get(name, {})
    values: dict[str, Any] = {"checks": known.get("checks", 0) + 1}
    took = None
    if right and known.get("started"):
        took = time.time() - known["started"]
        level = known.get("level", "body")
        best = dict(known.get("solved", {}))
        best[level] = min(took, best.get(level, took))
        values |= {"solved": best, "started": None}
    elif right:
        values["solved"] = {"file": None, **known.get("solved", {})}
    note(name, **values)
    return took
