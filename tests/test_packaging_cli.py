"""The `xtrain` command, and `xtrain doctor` on good and bad machines."""

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import xtrain
from xtrain import cli
from xtrain.doctor import Finding, command, gpus, installed, ranks, record
from xtrain.evidence.results import value_of
from xtrain.evidence.store import Entry, Store


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xtrain", *words], capture_output=True, text=True
    )


def test_version() -> None:
    assert run_cli("--version").stdout.strip() == f"xtrain {xtrain.__version__}"


def test_help_names_every_command_and_only_real_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    for name, entry in cli.COMMANDS.items():
        assert name in text
        module = __import__(entry.module, fromlist=["run"])
        assert callable(module.run)
        assert callable(module.add_arguments)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fly"])
    assert caught.value.code == 2
    assert "fly" in capsys.readouterr().err


def test_a_command_is_a_module_with_two_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("a_command_of_this_test")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int)  # type: ignore[attr-defined]
    module.run = lambda arguments: arguments.n + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command = cli.Command(module.__name__, "add one")
    monkeypatch.setitem(cli.COMMANDS, "plus", command)
    assert cli.main(["plus", "--n", "4"]) == 5


def test_ctrl_c_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert cli.main(["doctor"]) == 130


def test_doctor_finds_this_machine_fit() -> None:
    """A real run: two ranks start, meet over loopback and add up a tensor."""
    done = run_cli("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert set(findings) >= {"python", "torch", "loopback", "gpus", "gloo", "record"}
    assert findings["xtrain"]["state"] == "ok"
    assert "torch has gloo" in findings["backends"]["text"]
    assert "ours: xtrain-socket, xtrain-shm" in findings["backends"]["text"]
    for backend in ("gloo", *ranks.OWN_BACKENDS):
        assert findings[backend]["state"] == "ok"
    assert not [f for f in findings.values() if f["state"] == "problem"]


def test_doctor_prints_a_line_for_each_finding_and_fails_on_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("a", "ok", "fine"), Finding("b", "problem", "broken")]
    monkeypatch.setattr(command, "examine", lambda: iter(findings))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "a", "fine"]
    assert lines[1].split() == ["FAIL", "b", "broken"]
    assert lines[-1].startswith("1 to repair")


def test_doctor_says_which_backends_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    ours = "ours: xtrain-socket, xtrain-shm"
    monkeypatch.setattr(dist, "is_backend_available", lambda n: n in ("gloo", "mpi"))
    assert ranks.check_backends().text == f"torch has gloo, mpi, not nccl, ucc; {ours}"
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    text = ranks.check_backends().text
    assert text == f"torch has gloo, nccl, mpi, ucc; {ours}"


class InstalledXtrain:
    """What importlib.metadata says of another project's xtrain in `folder`."""

    version = "0.4.3"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = ["xtrain-0.4.3.dist-info/RECORD", "xtrain/__init__.py"]

    def locate_file(self, file: str) -> Path:
        return self.folder / file


def test_doctor_names_another_projects_xtrain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = Path(xtrain.__file__).parents[1]
    for folder, state, word in (
        (ours, "problem", "pip uninstall"),
        (tmp_path, "note", "hides"),
    ):
        other = InstalledXtrain(folder)
        monkeypatch.setattr(installed.metadata, "distribution", lambda name, o=other: o)
        finding = installed.check_name()
        assert finding.state == state
        assert word in finding.text
        assert "another project's xtrain 0.4.3" in finding.text
    other.files = ["__editable__.pth"]  # a checkout of ours under its former name
    assert installed.check_name().state == "ok"


def test_doctor_does_not_send_the_user_of_a_wheel_to_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "lib" / "site-packages" / "xtrain"
    monkeypatch.setattr(xtrain, "__file__", str(site / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "examine", lambda: iter([record.check_record()]))
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "can run xtrain; its tests come with the source" in said
    assert "make" not in said


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = {finding.name: finding for finding in command.examine()}
    assert findings["torch"].state == "problem"
    assert "gloo" not in findings
    assert "loopback" in findings


def test_doctor_on_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("torch")
    old.__version__ = "2.9.1+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", old)
    assert installed.check_torch().state == "problem"
    assert "2.11" in installed.check_torch().text


def test_doctor_on_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "MINIMUM_PYTHON", (9, 0))
    assert installed.check_python().state == "problem"


def test_doctor_when_ranks_give_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongWorld:
        def __init__(self, size: int, backend: str) -> None: ...
        def __enter__(self) -> "WrongWorld":
            return self

        def __exit__(self, *details: object) -> None: ...
        def run(self, function: object) -> list[int]:
            return [3, 4]

    monkeypatch.setattr("xtrain.testing.World", WrongWorld)
    finding = ranks.check_backend("gloo")
    assert finding.state == "problem"
    assert "[3, 4]" in finding.text


@pytest.mark.parametrize(
    ("version", "state"),
    [(None, "note"), ((2, 29, 7), "note"), ((2, 30, 3), "ok")],
)
def test_doctor_on_sharing_a_gpu(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...] | None, state: str
) -> None:
    monkeypatch.setattr(gpus, "_nccl_version", lambda: version)
    assert gpus.check_sharing().state == state


def test_doctor_reads_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "record_folder", lambda: tmp_path)
    assert record.check_record().state == "note"
    ran: dict[str, list[tuple[str, int]] | None] = {"a:b": [("gloo", 2)], "a:c": None}
    entry = Entry("1234", "2.13", ()).with_value(value_of("passed", 0.1, ran))
    about = {"created": "2026-11-21T10:00:00", "torch": "2.13.0"}
    Store(tmp_path / "gloo-cpu.json", tmp_path).write({"test_a": entry}, about)
    finding = record.check_record()
    assert finding.state == "ok"
    assert "1 symbols, 2026-11-21, torch 2.13.0" in finding.text
    (tmp_path / "gloo-cpu.json").write_text("{")
    assert record.check_record().state == "problem"
