"""`setup_env.py`: what it decides, and what it says when something is missing."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.processes import wait_until

ROOT = Path(__file__).resolve().parents[1]


spec = importlib.util.spec_from_file_location("setup_env", ROOT / "setup_env.py")
assert spec is not None and spec.loader is not None
setup_env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_env)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.10.1", False),
        ("2.9.0+cu128", False),
        ("1.13.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.14.0a0+git123", True),
        ("3.0.0", True),
        ("unknown", False),
    ],
)
def test_which_torch_is_kept(version, fits):
    assert setup_env.new_enough(version) is fits


def test_the_pinned_torch_is_read():
    assert setup_env.pinned_torch("a==1\ntorch==2.13.0\n") == "2.13.0"
    with pytest.raises(setup_env.SetupError, match="torch=="):
        setup_env.pinned_torch("torchvision==1.0\n")


def test_pins_beside_our_torch_are_all_kept():
    pins = "torch==2.13.0\nsympy==1.14.0\npytest==9.2.0\n"
    python = Path(sys.executable)
    kept = setup_env.effective_constraints(python, pins, "2.13.0+cpu", True)
    assert kept == pins, "the package of torch 2.13.0+cu130 calls itself 2.13.0"


def test_pins_of_what_another_torch_needs_are_dropped():
    pins = (
        "# a note\ntorch==2.13.0\nsympy==1.14.0\nmpmath==1.3.0\n"
        'typing-extensions==4.16.0\npytest==9.2.0; python_version < "4"\n'
    )
    python = Path(sys.executable)
    kept = setup_env.effective_constraints(python, pins, "2.12.0", False)
    assert kept.splitlines() == [
        "# a note",
        "torch==2.12.0",
        'pytest==9.2.0; python_version < "4"',
    ]


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "Retrying after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "No network",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "no such torch"),
        ("ERROR: No matching distribution found for ruff==9", "pinned package"),
        ("SSLError(... CERTIFICATE_VERIFY_FAILED ...)", "certificate"),
    ],
)
def test_a_failed_install_is_explained(said, hint):
    command = [sys.executable, "-c", f"print({said!r}); raise SystemExit(3)"]
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.run_quietly(command, "Installing")
    message = str(caught.value)
    assert "Installing failed (exit code 3)" in message
    assert said.splitlines()[-1] in message
    assert hint in message


def test_a_missing_venv_module_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "ensurepip" else find(n)
    )
    with pytest.raises(setup_env.SetupError, match=r"ensurepip.*\n.*apt install"):
        setup_env.check_tools()


def make_environment(folder, state):
    """A folder that looks like an environment of this Python."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    if state is not None:
        (folder / "xtrain.json").write_text(json.dumps(state))


def test_an_environment_made_by_hand_is_used_as_it_is(tmp_path):
    make_environment(tmp_path / "env", None)
    state = setup_env.read_state(tmp_path / "env", "here 3.11")
    assert state["python"] == "here 3.11"
    assert state["torch"] is None


def test_no_environment_and_a_broken_one_are_made_anew(tmp_path):
    assert setup_env.read_state(tmp_path / "none", "here 3.11") == {}
    make_environment(tmp_path / "env", {"python": "x"})
    (tmp_path / "env" / "bin" / "python").unlink()
    (tmp_path / "env" / "bin" / "python").symlink_to(tmp_path / "gone")
    assert setup_env.read_state(tmp_path / "env", "here 3.11") == {}


def test_ctrl_c_while_the_environment_is_made_leaves_nothing(tmp_path):
    """The signal goes to the whole group, as a terminal sends it."""
    for name in ("setup_env.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "setup_env.py", "--torch", "2.13.0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in a shell's background ignores Ctrl-C; its children must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        made = tmp_path / ".venv" / "bin" / "python"
        wait_until(lambda: made.exists() or process.poll() is not None)
        assert made.exists(), process.stdout and process.stdout.read()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "stopped; run it again" in said
    assert not (tmp_path / ".venv").exists()


def test_what_a_kill_leaves_half_made_is_made_anew(tmp_path, monkeypatch):
    """Nothing of ours runs after kill -9, so the word is there from the start."""

    def killed(*details, **options):
        make_environment(tmp_path / "env", None)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(setup_env.subprocess, "run", killed)
            setup_env.make_venv(tmp_path / "env", share_packages=False)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "env" / "bin" / "python").exists()
    assert setup_env.read_state(tmp_path / "env", "here 3.11") == {}


def test_an_environment_without_a_pip_that_works_is_named(ready, capsys):
    """As an older xtrain left it after Ctrl-C, or as a tool without pip makes it."""
    (ready / ".venv" / "xtrain.json").unlink()
    (ready / ".venv" / "bin" / "python").unlink()
    python = ready / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] && exit 1\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    assert run_setup() == 1
    said = capsys.readouterr().out
    assert "has no pip that works. Remove that folder" in said
    assert str(ready / ".venv") in said


def test_a_torch_that_is_kept_gets_a_torchrun_in_the_environment(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho this one >&2\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    setup_env.write_torchrun(python)
    done = subprocess.run([folder / "torchrun", "-h"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("this one"), "started by the environment's Python"
    assert "--nproc-per-node" in done.stdout
    (folder / "torchrun").write_text("pip's own")
    setup_env.write_torchrun(python)
    assert (folder / "torchrun").read_text() == "pip's own"


def test_another_projects_xtrain_is_named(tmp_path, monkeypatch):
    setup_env.check_import(Path(sys.executable))  # ours is found
    (tmp_path / "xtrain").mkdir()
    (tmp_path / "xtrain" / "__init__.py").write_text("import jax_that_is_not_here\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(setup_env.SetupError, match="pip uninstall xtrain") as caught:
        setup_env.check_import(Path(sys.executable))
    assert str(tmp_path / "xtrain") in str(caught.value)


def run_setup(*words):
    """`python setup_env.py *words` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["setup_env.py", *words])
        return setup_env.main()


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A checkout whose environment is up to date."""
    import hashlib

    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "check_import", lambda python: None)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    base = f"{sys.prefix} {sys.version_info[0]}.{sys.version_info[1]}"
    inputs = ["[project]\n", "torch==2.13.0\n", base, ""]
    state = {
        "python": base,
        "root": str(tmp_path),
        "torch": "installed",
        "extras": "docs,test",
        "key": hashlib.sha256("\0".join(inputs).encode()).hexdigest(),
    }
    make_environment(tmp_path / ".venv", state)
    return tmp_path


@pytest.fixture
def commands(ready, monkeypatch):
    """The commands that a run would install with."""
    found = []
    monkeypatch.setattr(
        setup_env, "run_quietly", lambda command, what: found.append(command)
    )
    return found


def test_a_second_run_does_nothing(commands, capsys):
    assert run_setup() == 0
    assert commands == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("pyproject.toml", "[project]\nname = 'x'\n", []),
        ("constraints.txt", "torch==2.13.0\nruff==1.0\n", []),
        (None, "", ["--dev"]),
        (None, "", ["--torch", "2.12.0"]),
    ],
)
def test_a_change_installs_again(ready, commands, monkeypatch, file, text, words):
    if file:
        (ready / file).write_text(text)
    torch = words[-1] if "--torch" in words else "2.13.0"
    monkeypatch.setattr(setup_env, "torch_of", lambda python: torch)
    assert run_setup(*words) == 0
    assert [c for c in commands if "-e" in c], "xtrain was not installed again"
    assert not [c for c in commands if "torch==2.13.0" in c], "torch was there"
    commands.clear()
    assert run_setup(*words) == 0
    assert commands == [], "the second run is quick"


def test_a_torch_that_is_there_is_kept(ready, commands, monkeypatch, capsys):
    (ready / ".venv" / "xtrain.json").unlink()  # an environment of the user's own
    monkeypatch.setattr(setup_env, "torch_of", lambda python: "2.12.1+cu130")
    assert run_setup() == 0
    said = capsys.readouterr().out
    assert "torch 2.12.1+cu130 is already importable and is kept" in said
    assert not [c for c in commands for word in c if word.startswith("torch")]
    pins = (ready / ".venv" / "constraints.txt").read_text()
    assert pins == "torch==2.12.1\n"


def test_an_old_torch_is_replaced_in_the_environment_only(ready, commands, monkeypatch):
    (ready / ".venv" / "xtrain.json").unlink()
    versions = iter(["2.9.0", "2.13.0", "2.13.0"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "torch" else find(n)
    )
    monkeypatch.setattr(setup_env, "torch_of", lambda python: next(versions))
    assert run_setup() == 0
    assert "torch==2.13.0" in commands[0], "torch comes first and alone"
    assert str(ready / ".venv") in commands[0][0]


@pytest.fixture
def pip(ready, monkeypatch):
    """A pip whose "torch" is the installed one; it fails at `broken`, if given."""
    world = {"torch": "2.13.0", "broken": ""}

    def install(command, what):
        if what == world["broken"]:
            raise setup_env.SetupError("no network")
        named = [word for word in command if word.startswith("torch==")]
        if named:
            world["torch"] = named[0].removeprefix("torch==")

    monkeypatch.setattr(setup_env, "run_quietly", install)
    monkeypatch.setattr(setup_env, "torch_of", lambda python: world["torch"])
    return world


def test_a_torch_that_was_named_once_stays(ready, pip, capsys):
    assert run_setup("--torch", "2.15.0") == 0
    assert pip["torch"] == "2.15.0"
    capsys.readouterr()
    assert run_setup() == 0
    assert capsys.readouterr().out == "", "there is nothing to do"
    (ready / "constraints.txt").write_text("torch==2.13.0\npytest==9.2.0\n")
    assert run_setup() == 0
    assert "torch 2.15.0 was chosen earlier; TORCH=2.13.0" in capsys.readouterr().out
    assert pip["torch"] == "2.15.0"
    assert run_setup("--torch", "2.13.0") == 0
    assert pip["torch"] == "2.13.0"
    (ready / "constraints.txt").write_text("torch==2.14.0\n")
    assert run_setup() == 0
    assert pip["torch"] == "2.14.0", "whoever named the pin follows it"


def test_the_pin_by_name_gets_all_its_pins_and_is_quick_the_second_time(
    ready, pip, monkeypatch, capsys
):
    pip["torch"] = "2.12.0"
    (ready / ".venv" / "xtrain.json").unlink()
    (ready / "constraints.txt").write_text("torch==2.13.0\nsympy==1.14.0\n")
    needs = setup_env.effective_constraints
    told: list[bool] = []

    def recording(python, text, torch, ours):
        told.append(ours)
        return needs(python, text, torch, ours)

    monkeypatch.setattr(setup_env, "effective_constraints", recording)
    assert run_setup("--torch", "2.13.0") == 0
    assert told == [True]
    pins = (ready / ".venv" / "constraints.txt").read_text()
    assert pins == "torch==2.13.0\nsympy==1.14.0\n"
    capsys.readouterr()
    assert run_setup("--torch", "2.13.0") == 0
    assert capsys.readouterr().out == ""


def test_a_torch_that_cannot_be_had_is_not_remembered(ready, pip):
    pip["broken"] = "Installing torch"
    assert run_setup("--torch", "9.9.9") == 1
    pip["broken"] = ""
    assert run_setup() == 0
    assert pip["torch"] == "2.13.0"


def test_a_torch_of_ours_is_not_taken_for_the_users_after_a_failure(ready, pip):
    """TORCH=2.12.0 was installed, then the network went; naming the pin brings it."""
    (ready / "constraints.txt").write_text("torch==2.13.0\npytest==9.2.0\n")
    (ready / ".venv" / "xtrain.json").unlink()
    pip["broken"] = "Installing xtrain"
    assert run_setup("--torch", "2.12.0") == 1
    pip["broken"] = ""
    assert run_setup() == 0
    assert pip["torch"] == "2.12.0", "as it was named"
    assert run_setup("--torch", "2.13.0") == 0
    assert pip["torch"] == "2.13.0"


def test_an_older_python_is_told(tmp_path):
    """The first lines of the file, run with a Python that says it is 3.8."""
    source = (ROOT / "setup_env.py").read_text().split("import argparse")[0]
    code = (
        "import sys\n"
        "class Old(tuple): pass\n"
        "sys.version_info = Old((3, 8, 1))\n" + source
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer; this is Python 3.8" in done.stderr
