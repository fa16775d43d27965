"""`xtrain doctor` on good and bad machines."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import xtrain
from xtrain import cli
from xtrain.cli import doctor
from xtrain.cli import doctor_checks as checks
from xtrain.cli.doctor_checks import Finding
from xtrain.evidence.results import value_of
from xtrain.evidence.store import Entry, Store
from xtrain.testing.backend_choice import Machine


def test_doctor_finds_this_machine_fit():
    """A real run: two ranks start, meet over loopback and add up a tensor."""
    words = [sys.executable, "-m", "xtrain", "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert set(findings) >= {"python", "torch", "loopback", "gpus", "gloo", "record"}
    assert findings["xtrain"]["state"] == "ok"
    assert "torch has gloo" in findings["backends"]["text"]
    assert "ours: xtrain-socket, xtrain-shm" in findings["backends"]["text"]
    for backend in ("gloo", *checks.OWN_BACKENDS):
        assert findings[backend]["state"] == "ok"
    assert not [f for f in findings.values() if f["state"] == "problem"]


def test_doctor_prints_a_line_for_each_finding_and_fails_on_a_problem(
    monkeypatch, capsys
):
    findings = [Finding("a", "ok", "fine"), Finding("b", "problem", "broken")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "a", "fine"]
    assert lines[1].split() == ["FAIL", "b", "broken"]
    assert lines[-1].startswith("1 to repair")


def test_doctor_says_which_backends_torch_has(monkeypatch):
    import torch.distributed as dist

    ours = "ours: xtrain-socket, xtrain-shm"
    monkeypatch.setattr(dist, "is_backend_available", lambda n: n in ("gloo", "mpi"))
    assert checks.check_backends().text == f"torch has gloo, mpi, not nccl, ucc; {ours}"
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    text = checks.check_backends().text
    assert text == f"torch has gloo, nccl, mpi, ucc; {ours}"


class InstalledXtrain:
    """What importlib.metadata says of another project's xtrain in `folder`."""

    version = "0.4.3"

    def __init__(self, folder):
        self.folder = folder
        self.files = ["xtrain-0.4.3.dist-info/RECORD", "xtrain/__init__.py"]

    def locate_file(self, file):
        return self.folder / file


def test_doctor_names_another_projects_xtrain(monkeypatch, tmp_path):
    ours = Path(xtrain.__file__).parents[1]
    for folder, state, word in (
        (ours, "problem", "pip uninstall"),
        (tmp_path, "note", "hides"),
    ):
        other = InstalledXtrain(folder)
        monkeypatch.setattr(checks.metadata, "distribution", lambda name, o=other: o)
        finding = checks.check_name()
        assert finding.state == state
        assert word in finding.text
        assert "another project's xtrain 0.4.3" in finding.text
    other.files = ["__editable__.pth"]  # a checkout of ours under its former name
    assert checks.check_name().state == "ok"


def test_doctor_does_not_send_the_user_of_a_wheel_to_make(
    monkeypatch, tmp_path, capsys
):
    site = tmp_path / "lib" / "site-packages" / "xtrain"
    monkeypatch.setattr(xtrain, "__file__", str(site / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda: iter([checks.check_record()]))
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "can run xtrain; its tests come with the source" in said
    assert "make" not in said


def test_doctor_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["torch"].state == "problem"
    assert "gloo" not in findings
    assert "loopback" in findings


def test_doctor_on_an_old_torch(monkeypatch):
    old = types.ModuleType("torch")
    old.__version__ = "2.9.1+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", old)
    assert checks.check_torch().state == "problem"
    assert "2.11" in checks.check_torch().text


def test_doctor_on_an_old_python(monkeypatch):
    monkeypatch.setattr(checks, "MINIMUM_PYTHON", (9, 0))
    assert checks.check_python().state == "problem"


def test_doctor_when_ranks_give_a_wrong_sum(monkeypatch):
    class WrongWorld:
        def __init__(self, size: int, backend: str) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *details: object) -> None: ...
        def run(self, function):
            return [3, 4]

    monkeypatch.setattr("xtrain.testing.World", WrongWorld)
    finding = checks.check_backend("gloo")
    assert finding.state == "problem"
    assert "[3, 4]" in finding.text


@pytest.mark.parametrize(
    ("gpus", "version", "state", "words"),
    [
        (0, None, "note", "without NCCL"),
        (
            1,
            (2, 29, 7),
            "note",
            "--target build/nccl nvidia-nccl",
        ),
        (8, (2, 29, 7), "ok", "worlds of up to 8"),
        (1, (2, 30, 3), "ok", "worlds of up to 8"),
    ],
)
def test_doctor_on_sharing_a_gpu(monkeypatch, gpus, version, state, words):
    monkeypatch.setattr(checks, "_machine", lambda: Machine(gpus, version))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    finding = checks.check_sharing()
    assert (finding.state, words in finding.text) == (state, True)


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (Machine(1, (2, 30, 7)), "ok", "2.30.7"),
        (Machine(1, None), "note", "cannot be asked"),
        (Machine(), "note", "the tests run on gloo"),
    ],
)
def test_doctor_tells_the_version_of_the_library(monkeypatch, machine, state, words):
    monkeypatch.setattr(checks, "_machine", lambda: machine)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    finding = checks.check_nccl()
    assert (finding.state, words in finding.text) == (state, True)


def test_doctor_reads_the_record(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "record_folder", lambda: tmp_path)
    assert checks.check_record().state == "note"
    ran: dict[str, list[tuple[str, int]] | None] = {"a:b": [("gloo", 2)], "a:c": None}
    entry = Entry("1234", "2.13", ()).with_value(value_of("passed", 0.1, ran))
    about = {"created": "2026-11-21T10:00:00", "torch": "2.13.0"}
    Store(tmp_path / "gloo-cpu.json", tmp_path).write({"test_a": entry}, about)
    finding = checks.check_record()
    assert finding.state == "ok"
    assert "1 symbols, 2026-11-21, torch 2.13.0" in finding.text
    (tmp_path / "gloo-cpu.json").write_text("{")
    assert checks.check_record().state == "problem"
