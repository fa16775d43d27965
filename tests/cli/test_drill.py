"""`xtrain drill`: from the list to a solved drill."""

import json
import subprocess
import sys

import pytest

from xtrain import cli
from xtrain.practice import drill, drills

NAME = "exchange"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def run(capsys, *words) -> tuple[int, str, str]:
    code = cli.main(["drill", *map(str, words)])
    return code, *capsys.readouterr()


@pytest.mark.verifies("xtrain.cli.drill:run")
def test_the_way_from_the_list_to_a_solved_drill(capsys, tmp_path):
    code, out, _ = run(capsys, "list")
    assert code == 0 and f"{len(drills())} drills." in out
    assert "x " + NAME not in out

    code, out, _ = run(capsys, "start", NAME)
    assert code == 0 and out.startswith("exchange.py: exchange, level body; the clock")
    code, out, err = run(capsys, "check", NAME, "exchange.py", "--virtual")
    assert (code, err) == (1, "A hint: xtrain drill hint exchange\n")
    assert "there is a gap to fill" in out

    hints = [run(capsys, "hint", NAME)[1] for _ in range(4)]
    assert hints[0].startswith("Hint 1 of 3. It sends: ")
    assert hints[2] == hints[3] and "lines are missing here" in hints[2]

    code, out, _ = run(capsys, "solution", NAME)
    assert (code, out) == (0, drill(NAME).solution)
    (tmp_path / "exchange.py").write_text(out)
    code, out, _ = run(capsys, "check", NAME, "exchange.py", "--virtual")
    assert code == 0 and "since the start; the drill gives 5 min." in out

    code, out, _ = run(capsys, "progress")
    assert "exchange: body in 0 min" in out and "2 checks, 3 hints" in out
    assert f"1 of {len(drills())} solved" in out
    assert "x " + NAME in run(capsys, "list")[1]


def test_the_list_as_data(capsys):
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert [row["name"] for row in rows] == list(drills())
    assert rows[0] == {
        "name": "exchange", "lecture": "lc1", "minutes": 5, "difficulty": 1,
        "levels": ["gap", "body", "blank"], "lines": rows[0]["lines"],
    }  # fmt: skip
    assert all(1 <= row["difficulty"] <= 5 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "exchang"], "there is no drill 'exchang'; nearest: exchange"),
        (["check", "exchange", "nowhere.py"], "No such file or directory: nowhere.py"),
        (["start", "exchange", "-o", "there.py"], "there.py exists: pass --force"),
        (["check", "exchange", "bytes.py"], "bytes.py is not text in UTF-8"),
        (["check", "exchange", "long.py"], "long.py has more than 200000 characters"),
    ],
)
def test_what_is_refused(capsys, tmp_path, words, said):
    (tmp_path / "there.py").write_text("")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.py").write_text("# " + "x" * 200_000)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and said in err


def test_a_file_of_progress_that_is_not_ours_is_left_alone(capsys, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "drills.json").write_text("[1]")
    code, _, err = run(capsys, "progress")
    assert code == 2 and "is not a file of drills: move it away" in err
    assert (tmp_path / "state" / "drills.json").read_text() == "[1]"


def test_the_list_needs_no_torch():
    program = (
        "import sys\nfrom xtrain import cli\n"
        "code = cli.main(['drill', 'list'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert said.stdout.splitlines()[-1] == "0 False", said.stderr
