"""Errors of all commands are one line and exit code 2; where their output goes."""

import importlib
import json
import os
import pty
import re
import subprocess
import sys
import types

import pytest

import xtrain
from xtrain import cli
from xtrain.cli import doctor

XTRAIN = [sys.executable, "-m", "xtrain"]
PLAN = ["plan", "--model", "llama-3-8b", "--gpus", "8"]
BIG = "1" + "0" * 400
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 5,
    "num_attention_heads": 6, "intermediate_size": 40,
}  # fmt: skip
LATENT = LLAMA | {
    "model_type": "deepseek_v3", "q_lora_rank": 11, "kv_lora_rank": 7,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 9,
    "n_shared_experts": 2, "first_k_dense_replace": 2,
}  # fmt: skip


def refused(capsys, *words):
    """The one line on standard error; the exit code is 2."""
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.endswith("\n") and said.err.count("\n") == 1
    assert len(said.err) <= 201, said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "xtrain: argument COMMAND: invalid choice: 'fly'"),
        (["x" * 5000], "xtrain: argument COMMAND"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["plan"], "required: --model, --gpus"),
        ([*PLAN, "--model", "llama-9"], "preset 'llama-9'"),
        ([*PLAN, "--gpu", "a1"], "unknown accelerator 'a1'"),
        ([*PLAN, "--gpus", "0"], "gpus=0"),
        ([*PLAN, "--sequence", "0"], "sequence=0"),
        ([*PLAN, "--tensor", "5"], "cannot be divided"),
        ([*PLAN, "--network", "0"], "network=0.0 is not a finite number above 0"),
        ([*PLAN, "--precision", "fp6"], "invalid choice: 'fp6'"),
        ([*PLAN, "--gpu", "v100", "--precision", "fp8"], "v100 has no fp8 products"),
        ([*PLAN, "--price", "2"], "--price takes --tokens"),
        ([*PLAN, "--model", "lama-3-8b"], "did you mean llama-3-8b"),
        ([*PLAN, "--reserve", "-500"], "reserve=-500 GiB is not from 0"),
        ([*PLAN, "--memory", "0"], "capacity=0.0"),
        ([*PLAN, "--memory", "nan"], "capacity=nan"),
        ([*PLAN, "--batch", "0"], "batch=0 is not"),
        ([*PLAN, "--top", "0"], "top=0 is not"),
        ([*PLAN, "--sequence", BIG], "is above 2^63 - 1"),
        ([*PLAN, "--tensor", BIG], "is above 2^63 - 1"),
        ([*PLAN, "--gpus", BIG * 20], "invalid int value"),
        ([*PLAN, "--gpus", "720720"], "fix the size of an axis (tensor, pipeline"),
        ([*PLAN, "--gpus", "1000001"], "gpus=1000001 is above 1000000"),
        ([*PLAN, "--gpu", "h100-80gb"], "'h100-80gb'; did you mean h100?"),
        ([*PLAN, "--model", "/dev/zero"], "'/dev/zero' is not a regular file"),
        ([*PLAN, "--model", "/dev"], "there is no '/dev/config.json'"),
        ([*PLAN, "--model", "x" * 5000], "File name too long"),
        (
            ["schedule", "gpipe", "--svg", "/nope/x.svg"],
            "No such file or directory: /nope/x.svg",
        ),
        (["schedule", "gpip"], "no schedule 'gpip'; did you mean gpipe"),
        (["schedule", "dualpipe", "--stages", "3"], "take 2 or 4"),
        (["schedule", "gpipe", "--chunks", "2"], "--chunks belongs to interleaved"),
        (["schedule", "gpipe", "--forward", "-1"], "time of F is -1"),
        (
            ["schedule", "gpipe", "--forward", "0", "--backward-input", "0",
             "--backward-weight", "0"],
            "take no time",
        ),
        (["schedule", "gpipe", "--stages", BIG], "chunks are above 100000"),
        (["schedule", "interleaved", "--chunks", "3126"], "chunks are above 100000"),
        (["schedule", "gpipe", "--forward", "1e-9"], "at most 1000 times the shortest"),
        (["schedule", "gpipe", "--p2p", "inf"], "at most 1000 times the shortest"),
        (["schedule", "dualpipe", "--overlapped", "-1"], "an overlapped pair is -1.0"),
        (["schedule", "x" * 5000], "no schedule 'xxx"),
        (["bench"], "which races? there are: backends, lc1"),
        (["bench", "lc99"], "there are: backends, lc1"),
        (["bench", "lc1", "--race", "marathon"],
         "no race marathon; there are: all_reduce_small"),
        (["bench", "lc1", "--ranks", "0"], "numbers of ranks are from 1 to 64"),
        (["bench", "lc1", "--ranks", "100000"], "numbers of ranks are from 1 to 64"),
        (["bench", "lc1", "--sizes", "0"], "sizes are from 1 B to 64 GiB"),
        (["bench", "lc1", "--rounds", "0"], "--rounds=0"),
        (["bench", "lc1", "--quick", "--output", "/"], "/ is a folder"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_code_2(capsys, words, said):
    assert said in refused(capsys, *words)


@pytest.mark.verifies("xtrain.plan.config_json:load_shape")
@pytest.mark.parametrize("base", [LLAMA, LATENT])
def test_a_hostile_config_is_refused_in_a_line(capsys, tmp_path, base):
    path = tmp_path / "config.json"
    words = ["plan", "--model", str(path), "--gpus", "4"]
    for name in base:
        for value in ([], {"a": 1}, "x", -1, 1.5, 10**400, 2**63, float("nan")):
            path.write_text(json.dumps(base | {name: value}))
            assert name in refused(capsys, *words)
    path.write_text(json.dumps(base | {"num_hidden_layers": 2**31}))
    assert "num_hidden_layers=2147483648 is above 10000" in refused(capsys, *words)
    for text, said in (("[" * 100_000, "is not JSON"), (b"\xff\xfe\x00", "is not JSON"),
                       (" " * 2**22 + "{}", "is longer than")):  # fmt: skip
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert said in refused(capsys, *words)
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in refused(capsys, *words)


@pytest.mark.parametrize(
    "words",
    [[*PLAN, "--top", "200"], ["copy", "--list"],
     ["schedule", "gpipe", "--micro-batches", "3000"]],
)  # fmt: skip
def test_a_reader_who_leaves_early_ends_a_command_quietly(words):
    process = subprocess.Popen(
        [*XTRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_version():
    done = subprocess.run([*XTRAIN, "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == f"xtrain {xtrain.__version__}"


def test_help_names_every_command_and_only_real_ones(capsys):
    assert cli.main([]) == 2
    text = " ".join(capsys.readouterr().out.split())
    for name, (module_name, line) in cli.COMMANDS.items():
        assert name in text and line in text
        module = importlib.import_module(module_name)
        assert callable(module.run) and callable(module.add_arguments)


def test_a_command_is_a_module_with_two_functions(monkeypatch):
    module = types.ModuleType("a_command_of_this_test")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int)  # type: ignore[attr-defined]
    module.run = lambda arguments: arguments.n + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "plus", (module.__name__, "add one"))
    assert cli.main(["plus", "--n", "4"]) == 5


def test_ctrl_c_ends_a_command_quietly(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130


def test_a_refusal_of_several_lines_is_one():
    problem = ValueError("a first line\n  and a second,\tof 3 words")
    assert cli.refusal("xtrain plan", problem) == (
        "xtrain plan: a first line and a second, of 3 words"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*XTRAIN, *PLAN], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "xtrain plan: [Errno 28] No space left on device\n"


def on_a_terminal(columns, *words):
    """The lines of a command on a terminal of so many columns."""
    process, terminal = pty.fork()
    if process == 0:
        environment = {**os.environ, "COLUMNS": str(columns)}
        os.execve(sys.executable, [*XTRAIN, *words], environment)
    said = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end has closed
            break
        if not part:
            break
        said += part
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    os.close(terminal)
    return said.decode().replace("\r\n", "\n").splitlines()


@pytest.mark.verifies("xtrain.cli.schedule:run")
def test_a_drawing_is_as_wide_as_the_terminal(capsys):
    words = ["schedule", "zb_h1", "--micro-batches", "24"]
    lines = on_a_terminal(70, *words)
    assert max(map(len, lines)) <= 70
    assert cli.main(words) == 0
    whole = capsys.readouterr().out.splitlines()
    assert max(map(len, whole)) > 200
    for rank in range(4):  # the pieces of a row, one after the other, are the row
        name = f"rank {rank}   "
        row = "".join(line[9:] for line in lines if line.startswith(name))
        assert name + row == whole[rank]
        cut = [line.rstrip() for line in lines if line.startswith(name)]
        assert all(re.match(r"[.FBW]", line[9:]) for line in cut)
    wide = on_a_terminal(400, *words)
    assert wide[:4] == whole[:4]


@pytest.mark.parametrize("command", ["plan", "schedule"])
def test_the_help_shows_defaults(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    shown = {
        "plan": ["(default: 4096)", "(default: h100)", "(default: bf16)",
                 "(default: 4.0)", "(default: flash)"],
        "schedule": ["(default: 4)", "(default: 8)", "(default: 1.0)"],
    }  # fmt: skip
    assert all(text in said for text in shown[command])
    assert "None" not in said and "False" not in said


@pytest.mark.verifies("xtrain.cli.plan:run")
def test_a_path_with_brackets_is_shown_as_it_is(capsys, tmp_path):
    folder = tmp_path / "[bold]" / "[" / "]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert cli.main(["plan", "--model", str(folder), "--gpus", "1"]) == 0
    assert "[bold]/[/]" in capsys.readouterr().out.replace("\n", "")
