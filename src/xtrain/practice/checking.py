"""Checks a reader's file: in a process of its own, with limits, then in words.

    virtual ranks    values, bytes, rounds, order of messages; 1 to 4 ranks, a group
    real ranks       four gloo processes, if the virtual ones found nothing wrong

What a wrong file does is explained by `judging`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from xtrain.copying.forms import public_name, self_check
from xtrain.practice.drills import Drill
from xtrain.practice.judging import explained, forbidden
from xtrain.practice.outcomes import FILE, Outcome, decoded
from xtrain.practice.verdicts import Verdict, plain, verdict

SECONDS = 60.0
"""For all virtual cases of one file."""
REAL_SECONDS = 120.0
MEMORY = 8 << 30
OUTPUT = 16 << 20
"""Bytes that the file's process may write."""


class Process:
    """Runs files on virtual ranks, one after another, where they can do no harm."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds, self.killed = seconds, False
        self.process = self.started()

    def started(self) -> "subprocess.Popen[str]":
        """A process that waits for a file."""
        program = "from xtrain.practice.cases import main; main()"
        command = [sys.executable, "-c", program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
            preexec_fn=limit_memory if sys.platform == "linux" else None,
        )  # fmt: skip

    def outcomes(self, drill: Drill, source: str) -> list[Outcome] | None:
        """Of every case of a drill; None if the process has ended, by us or itself.

        The next file then gets another process.
        """
        if self.process.poll() is not None:
            self.process.communicate()
            self.killed, self.process = False, self.started()
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        timer = threading.Timer(self.seconds, self.kill)
        timer.start()
        try:
            pipes[0].write(json.dumps([drill.name, source]) + "\n")
            pipes[0].flush()
            answer = pipes[1].readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        return decoded(answer) if answer.endswith("\n") else None

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def limit_memory() -> None:
    """Of the process that calls it: its data, and the size of files it writes."""
    import resource  # of Unix

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT, OUTPUT))


def check(drill: Drill, source: str, real: bool = True) -> Verdict:
    """Run a file and say whether it is right, and if not, why.

    Args:
        real: also start four processes, if virtual ranks find nothing wrong.
    """
    problem = forbidden(source)
    if problem:
        return Verdict(False, problem)
    with Process() as process:
        wrong = compared(drill, source, process)
    if not real or not wrong.right:
        return wrong
    remark = wrong.words.partition("\n")[2]
    found = on_real_ranks(drill, source)
    return found.more(remark) if found.right else found


def compared(drill: Drill, source: str, process: Process) -> Verdict:
    """Run a file on virtual ranks, beside the solution and what is known of it."""
    expected = process.outcomes(drill, drill.solution)
    assert expected is not None, "the whiteboard form itself could not be run"
    found = process.outcomes(drill, source)
    wrong = ended(process) if found is None else verdict(drill, found, expected)
    if wrong.right or process.killed:
        return wrong
    return explained(
        drill, source, found, wrong, lambda text: process.outcomes(drill, text)
    )


def ended(process: Process) -> Verdict:
    """Of a file whose process was ended, or ended itself."""
    if process.killed:
        return Verdict(
            False, f"The file did not end within {process.seconds:.0f} seconds, and "
            f"could not be interrupted."
        )  # fmt: skip
    code = process.process.wait()
    if code == -11:
        return Verdict(
            False, "Signal 11: memory is used that has been freed, as of a tensor that "
            "is resized or dropped while it is under way."
        )  # fmt: skip
    why = f"signal {-code}" if code < 0 else f"exit status {code}"
    return Verdict(
        False, f"The file ended its own process ({why}): a drill is called, and "
        f"returns."
    )  # fmt: skip


def on_real_ranks(drill: Drill, source: str) -> Verdict:
    """The form's self-check, in four processes."""
    program = f"{source.rstrip()}\n\n\n" + self_check(
        drill.name, public_name(drill.solution), source
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{drill.name}.py"
        path.write_text(program, encoding="utf-8")
        command = [sys.executable, path.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=REAL_SECONDS)
        except subprocess.TimeoutExpired:
            said, process.returncode = "", -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        if process.returncode == 0:
            return Verdict(True, right_words(said))
        if process.returncode == -1:
            return Verdict(
                False, f"Right on virtual ranks; four processes did not end within "
                f"{REAL_SECONDS:.0f} seconds."
            )  # fmt: skip
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in lines if "WRONG" in line), lines[-1] if lines else "")
    return Verdict(
        False, f"Right on virtual ranks, wrong in four processes: "
        f"{plain(last.replace(str(path), FILE))}"
    )  # fmt: skip


def right_words(said: str) -> str:
    """What the self-check has counted on rank 0, in short."""
    sent = [line for line in said.splitlines() if line.startswith("rank 0: ")]
    counted = next((line for line in sent if ": 0 messages" not in line), "")
    words = "Right: values, bytes and order of messages."
    return f"{words}\nOn 4 processes {counted}" if counted else words
