"""Makes `.venv` and installs xtrain into it. Needs only Python 3.11 or newer.

    python setup_env.py                  packages for the site and the tests
    python setup_env.py --dev            also linters, type checker, pre-commit
    python setup_env.py --torch 2.12.1   another torch than the pinned one

A torch that this Python already has (2.11 or newer) is used as it is. A torch that
was named once stays until another one is named. A second run with the same
pyproject.toml and constraints.txt does nothing. `make` calls this.
"""

import sys

MINIMUM_PYTHON = (3, 11)
if sys.version_info < MINIMUM_PYTHON:
    sys.exit(
        "xtrain needs Python 3.11 or newer; this is Python %d.%d at %s.\n"
        "Install a newer one and name it: make test PYTHON=python3.12"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)
BUILD_BACKEND = ["hatchling", "editables"]

# What pip says -> what it means for the person who reads it. First match wins.
HINTS = [
    (
        r"No space left on device",
        "The disk is full. torch needs about 1 GB (CPU build), 6 GB (CUDA build).",
    ),
    (
        r"NewConnectionError|NameResolutionError|name resolution|Network is unreach"
        r"|Connection refused|ConnectTimeout|Read timed out|ProxyError"
        r"|Max retries exceeded",
        "No network: pip could not reach its package index. Connect, or set\n"
        "up the proxy or mirror that this machine should use (pip config), and\n"
        "run it again.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "The package index answered, but its certificate was not accepted.\n"
        "Behind a company proxy, name its certificate file:\n"
        "  pip config set global.cert FILE",
    ),
    (
        r"No matching distribution found for torch",
        "There is no such torch for this Python and this machine. Choose a Python\n"
        "that has one (PYTHON=python3.12), or install torch yourself: it is kept.",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "A pinned package is not to be had for this Python; PYTHON=python3.12\n"
        "names another one. The lines above say which package.",
    ),
]

# As pip writes it: a path with a blank or a long one does not fit into a #! line.
TORCHRUN = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys

from torch.distributed.run import main

sys.exit(main())
"""


class SetupError(Exception):
    """Something is missing; the message is all the reader needs."""


def say(text: str) -> None:
    print(text, flush=True)


def venv_python(venv: Path) -> Path:
    folder = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return venv / folder


def run_quietly(
    command: list[str], what: str, env: dict[str, str] | None = None
) -> None:
    """Run `command` with one moving line of progress; explain a failure."""
    started = time.monotonic()
    live = sys.stdout.isatty()
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    )
    assert process.stdout is not None
    done = threading.Event()

    def show() -> None:
        """Every quarter second on a terminal, every 15 seconds into a log."""
        width = shutil.get_terminal_size().columns - 1
        while not done.wait(0.25 if live else 15):
            seconds = int(time.monotonic() - started)
            news = next((t for t in reversed(lines) if interesting(t)), "")
            text = f"      {seconds:3d} s  {news.strip()}"
            if live:
                sys.stdout.write("\r" + text[:width].ljust(width))
                sys.stdout.flush()
            else:
                say(text[:100])
        if live:
            sys.stdout.write("\r" + " " * width + "\r")

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
        done.set()
        shower.join()
    if code:
        log = "\n".join(lines)
        hint = next((text for pattern, text in HINTS if re.search(pattern, log)), "")
        shown = "\n".join("      " + line for line in lines[-4 if hint else -15 :])
        raise SetupError(
            f"{what} failed (exit code {code}):\n{shown}\n\n{hint}".rstrip()
        )
    say(f"      done in {time.monotonic() - started:.0f} s")


def interesting(line: str) -> bool:
    return line.lstrip().startswith(
        ("Collecting", "Downloading", "Installing", "Using")
    )


def ask(python: Path | str, code: str) -> str | None:
    """What `code` prints when `python` runs it; None when it fails."""
    try:
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, timeout=180
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_of(python: Path | str) -> str | None:
    """The version of the torch that `python` can really import, or None."""
    found = ask(python, "import torch; print('version', torch.__version__)")
    return found.split()[-1] if found else None


def new_enough(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return bool(numbers) and tuple(map(int, numbers.groups())) >= MINIMUM_TORCH


def pinned_torch(constraints: str) -> str:
    found = re.search(r"^torch==(\S+)", constraints, re.MULTILINE)
    if not found:
        raise SetupError("constraints.txt has no line 'torch==...'")
    return found.group(1)


def check_tools() -> None:
    missing = [m for m in ("venv", "ensurepip") if importlib.util.find_spec(m) is None]
    if missing:
        raise SetupError(
            f"This Python ({sys.executable}) lacks {' and '.join(missing)}, so it\n"
            "cannot make an environment. On Debian and Ubuntu: apt install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        )


def make_venv(venv: Path, share_packages: bool) -> None:
    """A new environment; with `share_packages` it sees what this Python has."""
    if venv.exists():
        shutil.rmtree(venv)
    inside_venv = sys.prefix != sys.base_prefix
    command = [sys.executable, "-m", "venv", str(venv)]
    if share_packages and not inside_venv:
        command.insert(3, "--system-site-packages")
    # Half made, it has a Python and no pip. This word stays where even the lines
    # below do not get to run (kill -9, a power cut), so that nobody trusts it.
    venv.mkdir(parents=True)
    (venv / "xtrain.json").write_text(json.dumps({"making": True}))
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"Could not make {venv}:\n{done.stdout}{done.stderr}")
        if share_packages and inside_venv:
            # "System" would mean the Python underneath this virtual environment, so
            # point at the packages of this one instead. Its name sorts behind the
            # file that points at xtrain: theirs may hold another xtrain.
            code = "import sysconfig; print(sysconfig.get_path('purelib'))"
            shared = [p for p in sys.path if re.search("(site|dist)-packages$", p)]
            target = Path(ask(venv_python(venv), code) or "", "zz_shared_packages.pth")
            target.write_text("\n".join(shared) + "\n")
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(venv, ignore_errors=True)
        raise


def check_pip(venv: Path) -> None:
    """An environment that somebody made by hand may have none, or a broken one."""
    python = venv_python(venv)
    done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
    if done.returncode:
        raise SetupError(
            f"{venv} has no pip that works. Remove that folder, and it is made anew;\n"
            f"or, if it is yours to keep, give it one: {python} -m ensurepip"
        )


def write_torchrun(python: Path) -> None:
    """A torch outside the environment left its launcher outside, too."""
    script = python.with_name("torchrun")
    if not script.exists():
        script.write_text(TORCHRUN.format(python=python))
        script.chmod(0o755)


def check_import(python: Path) -> None:
    """Does `import xtrain` find this folder? PyPI has another project's xtrain."""
    found = ask(
        python,
        "from importlib.util import find_spec; print(find_spec('xtrain').origin)",
    )
    if found is None or not Path(found).is_relative_to(ROOT / "src"):
        raise SetupError(
            f"`import xtrain` finds {found or 'nothing'}, not {ROOT / 'src'}.\n"
            "The xtrain on PyPI is another project with the same import name; if it\n"
            f"is the one found, remove it: {python} -m pip uninstall xtrain"
        )


def effective_constraints(
    python: Path, constraints: str, torch: str, ours: bool
) -> str:
    """The pins to use beside the torch that is there.

    Its local part (+cpu, +cu130) is left out: the package's own version may lack it.
    A torch that is not ours has its own idea of what it needs, so the pins of its
    dependencies are left out.
    """
    release = torch.partition("+")[0]
    lines = re.sub(r"(?m)^torch==\S+", f"torch=={release}", constraints)
    if ours:
        return lines
    needs = ask(
        python,
        "import re\n"
        "from importlib.metadata import PackageNotFoundError, requires\n"
        "seen, todo = set(), ['torch']\n"
        "while todo:\n"
        "    try: lines = requires(todo.pop()) or []\n"
        "    except PackageNotFoundError: continue\n"
        "    for line in lines:\n"
        "        name = re.match(r'[\\w.-]+', line).group()\n"
        "        name = name.lower().replace('_', '-')\n"
        "        if 'extra' not in line and name not in seen:\n"
        "            seen.add(name); todo.append(name)\n"
        "print(*seen)",
    )
    theirs = set((needs or "").split())
    return "".join(
        line
        for line in lines.splitlines(keepends=True)
        if re.split(r"[=<>!~; \n]", line)[0].lower().replace("_", "-") not in theirs
    )


def read_state(venv: Path, base: str) -> dict[str, str | None]:
    """What an earlier run left in `venv`; {} when no environment works there."""
    version = ask(venv_python(venv), "import sys; print(*sys.version_info[:2])")
    if version is None:
        return {}
    file = venv / "xtrain.json"
    if file.exists():
        state = json.loads(file.read_text())
        return {} if "making" in state else state
    # Somebody made it by hand, perhaps around a torch they chose: use it as it is.
    if tuple(map(int, version.split())) < MINIMUM_PYTHON:
        raise SetupError(
            f"{venv} was made with Python {version.replace(' ', '.')}, which is "
            "too old. Remove it and run this again."
        )
    return {
        "python": base,
        "root": str(ROOT),
        "torch": None,
        "chosen": "",
        "extras": "",
        "key": "",
    }


def setup(arguments: argparse.Namespace) -> None:
    venv = ROOT / arguments.venv
    python = venv_python(venv)
    state_file = venv / "xtrain.json"
    pins = venv / "constraints.txt"
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    extras = "docs,test" + (",dev" if arguments.dev else "")
    pinned = pinned_torch(constraints)

    base = f"{sys.prefix} {sys.version_info[0]}.{sys.version_info[1]}"
    state = read_state(venv, base)
    if state and arguments.keep_python:
        base = state["python"]
    usable = bool(state) and state["python"] == base and state["root"] == str(ROOT)
    # The torch that was named, now or earlier. Naming the pin takes that back.
    named = arguments.torch or (usable and state.get("chosen")) or ""
    if named == pinned and usable and state["torch"]:
        named = ""

    def key_of(torch: str) -> str:
        inputs = [pyproject, constraints, base, torch]
        return hashlib.sha256("\0".join(inputs).encode()).hexdigest()

    same = usable and state["key"] == key_of(named)
    if same and set(extras.split(",")) <= set(state["extras"].split(",")):
        return

    say(f"[1/4] Python {sys.version.split()[0]} ({sys.executable})")
    check_tools()

    in_python = None
    if not named and importlib.util.find_spec("torch"):
        in_python = torch_of(sys.executable)
        if in_python and not new_enough(in_python):
            say(f"      its torch {in_python} is older than 2.11 and is left alone")
            in_python = None
    if not usable:
        say(f"[2/4] Making {venv.name}" + (" anew" if venv.exists() else ""))
        make_venv(venv, share_packages=in_python is not None)
        state = {"python": base, "root": str(ROOT), "torch": None, "extras": ""}
    else:
        say(f"[2/4] {venv.name} is there")
        check_pip(venv)
    state["key"] = ""
    state_file.write_text(json.dumps(state))

    # torch first and alone, so that nothing else can pull another one.
    wanted_torch = named or pinned
    if named and not arguments.torch:
        say(f"      torch {named} was chosen earlier; TORCH={pinned} takes it back")
    torch = torch_of(python)
    if torch and new_enough(torch) and not named and state["torch"] is None:
        say(f"[3/4] torch {torch} is already importable and is kept")
        ours = False
    elif torch and torch.split("+")[0] == wanted_torch.split("+")[0]:
        say(f"[3/4] torch {torch}")
        ours = wanted_torch == pinned
    else:
        where = " ".join(arguments.torch_args)
        say(f"[3/4] Installing torch {wanted_torch} {where}(once; it is large)")
        pip = [str(python), "-m", "pip", "install", f"torch=={wanted_torch}"]
        if wanted_torch == pinned:
            pins.write_text(re.sub(r"(?m)^torch==.*\n", "", constraints))
            pip += ["-c", str(pins)]
        run_quietly(pip + arguments.torch_args, "Installing torch")
        torch = torch_of(python)
        if torch is None:
            raise SetupError(
                f"torch {wanted_torch} is there, but `import torch` fails; see:\n"
                f"  {python} -c 'import torch'"
            )
        ours = wanted_torch == pinned
        state.update(torch="installed", chosen="" if ours else named)
        state_file.write_text(json.dumps(state))

    say(f"[4/4] Installing xtrain and what the extras {extras} need")
    pins.write_text(effective_constraints(python, constraints, torch, ours))
    pip = [str(python), "-m", "pip", "install", "-c", str(pins)]
    run_quietly([*pip, *BUILD_BACKEND], "Installing the build backend")
    run_quietly(
        [*pip, "--no-build-isolation", "-e", f"{ROOT}[{extras}]"],
        "Installing xtrain",
    )
    if torch_of(python) != torch:
        raise SetupError(f"torch {torch} did not survive the installation")
    check_import(python)
    write_torchrun(python)
    chosen = "" if wanted_torch == pinned and state["torch"] else named
    state.update(key=key_of(chosen), chosen=chosen, extras=extras)
    state_file.write_text(json.dumps(state))
    say(f"      {venv.name} is ready (torch {torch})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dev", action="store_true", help="add the developer's tools")
    parser.add_argument("--venv", default=".venv", help="where (default: .venv)")
    parser.add_argument("--torch", default="", metavar="VERSION", help="not the pin")
    parser.add_argument(
        "--torch-args",
        default="",
        help="more arguments for `pip install torch==...`",
    )
    parser.add_argument(
        "--keep-python",
        action="store_true",
        help="do not make .venv anew when it was made by another Python",
    )
    arguments = parser.parse_args()
    arguments.torch_args = arguments.torch_args.split()
    try:
        setup(arguments)
    except SetupError as error:
        say(f"\nxtrain: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nxtrain: stopped; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
