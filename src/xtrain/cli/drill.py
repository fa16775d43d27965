"""`xtrain drill`: algorithms to write by hand, checked by their messages."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from xtrain.copying.forms import lines_of_code
from xtrain.practice import LEVELS, Drill, check, drill, drills, progress, task

MOST_BYTES = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A drill is an algorithm of the whiteboard, with its name. `start` writes the "
        "file to begin with, `check` runs yours on ranks and says what is wrong: exit "
        "code 0 if it is right, 1 if not."
    )
    parts = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = parts.add_parser("list", help="all drills")
    one.add_argument("--json", action="store_true", help="as data")
    one = parts.add_parser("start", help="write the file to begin with")
    one.add_argument("name", metavar="NAME")
    one.add_argument(
        "--level", choices=LEVELS, default="body",
        help="gap: some lines are missing; body: signatures stand; blank: the task",
    )  # fmt: skip
    one.add_argument("-o", "--output", type=Path, metavar="FILE", help="NAME.py, else")
    one.add_argument("--force", action="store_true", help="replace the file")
    one = parts.add_parser("check", help="run a file, and say what is wrong")
    one.add_argument("name", metavar="NAME")
    one.add_argument("file", metavar="FILE", type=Path)
    one.add_argument(
        "--virtual", action="store_true", help="on virtual ranks alone, in seconds"
    )
    for action, text in (
        ("hint", "the next hint"),
        ("solution", "the whiteboard form"),
    ):
        one = parts.add_parser(action, help=text)
        one.add_argument("name", metavar="NAME")
    parts.add_parser("progress", help="what you have solved, and how fast")


def run(arguments: argparse.Namespace) -> int:
    """One action."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": list_drills, "start": start, "check": check_file, "hint": hint,
        "solution": solution, "progress": show_progress,
    }  # fmt: skip
    return actions[arguments.action](arguments)


def list_drills(arguments: argparse.Namespace) -> int:
    """A line a drill, by lecture."""
    known = drills()
    if arguments.json:
        rows = [
            {k: v for k, v in dataclasses.asdict(one).items() if k != "path"}
            | {"levels": list(LEVELS), "lines": lines_of_code(one.solution)}
            for one in known.values()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    solved = progress.read()
    width = max(map(len, known))
    print(f"   {'drill':{width}}  lecture  min  difficulty  computes")
    for one in known.values():
        mark = "x" if solved.get(one.name, {}).get("solved") else " "
        stars = "*" * one.difficulty
        cells = f"{one.name:{width}}  {one.lecture:7}  {one.minutes:3}  {stars:10}"
        print(f" {mark} {cells}  {title(one)}")
    print(f"\n{len(known)} drills. `xtrain drill start NAME` writes the file of one.")
    return 0


def title(one: Drill) -> str:
    """The first line of the form."""
    return one.solution.splitlines()[0].strip('"').rstrip(".")


def start(arguments: argparse.Namespace) -> int:
    """Write the file."""
    one = drill(arguments.name)
    path = arguments.output or Path(f"{one.name}.py")
    if (path.exists() or path.is_symlink()) and not arguments.force:
        raise ValueError(f"{path} exists: pass --force to replace it, or -o FILE")
    path.write_text(task(one, arguments.level), encoding="utf-8")
    progress.started(one.name, arguments.level)
    print(f"{path}: {one.name}, level {arguments.level}; the clock runs.")
    print(f"Then: xtrain drill check {one.name} {path}")
    return 0


def check_file(arguments: argparse.Namespace) -> int:
    """Run it and print the verdict."""
    one = drill(arguments.name)
    with arguments.file.open(encoding="utf-8") as opened:
        try:
            source = opened.read(MOST_BYTES + 1)
        except UnicodeDecodeError:
            raise ValueError(f"{arguments.file} is not text in UTF-8") from None
    if len(source) > MOST_BYTES:
        raise ValueError(f"{arguments.file} has more than {MOST_BYTES} characters")
    found = check(one, source, real=not arguments.virtual)
    took = progress.checked(one.name, found.right)
    print(found.words)
    if took is not None:
        print(f"{minutes(took)} since the start; the drill gives {one.minutes} min.")
    if not found.right:
        print(f"A hint: xtrain drill hint {one.name}", file=sys.stderr)
    return 0 if found.right else 1


def minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def hints(one: Drill) -> list[str]:
    """From what it sends to nearly all of the code."""
    calls = re.findall(r"\b(dist\.\w+|torch\.\w+|F\.\w+)(?=\()", one.solution)
    aside = ("dist.get_rank", "dist.get_world_size")
    used = ", ".join(dict.fromkeys(call for call in calls if call not in aside))
    lines, used = lines_of_code(one.solution), used or "nothing of torch"
    return [
        f"It sends: {one.header['Sends']}" if "Sends" in one.header else title(one),
        f"The solution has {lines} lines and calls {used}.",
        f"All but the lines that matter most:\n\n{task(one, 'gap')}",
    ]


def hint(arguments: argparse.Namespace) -> int:
    """The next one."""
    one = drill(arguments.name)
    every = hints(one)
    given = min(progress.read().get(one.name, {}).get("hints", 0), len(every) - 1)
    progress.note(one.name, hints=given + 1)
    print(f"Hint {given + 1} of {len(every)}. {every[given]}")
    return 0


def solution(arguments: argparse.Namespace) -> int:
    """The whiteboard form, as it is."""
    print(drill(arguments.name).solution, end="")
    return 0


def show_progress(arguments: argparse.Namespace) -> int:
    """What was started and solved, by lecture."""
    known, kept = drills(), progress.read()
    for name in known:
        mine = kept.get(name)
        if not mine:
            continue
        solved = mine.get("solved") or {}
        times = [
            f"{level} in {minutes(s)}" if s else "solved" for level, s in solved.items()
        ]
        words = ", ".join(times) or "not solved yet"
        checks, given = mine.get("checks", 0), mine.get("hints", 0)
        print(f"{name}: {words}; {checks} checks, {given} hints")
    done = sum(bool(kept.get(name, {}).get("solved")) for name in known)
    print(f"{done} of {len(known)} solved. Kept in {progress.file()}")
    return 0
