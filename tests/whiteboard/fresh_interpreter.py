"""Programs in processes that know torch and nothing of ours, in a tenth of the time.

    python -c SERVER         imports torch and its compiler, once
        fork -> FILE of A    as __main__, in its folder
        fork -> FILE of B

Importing torch takes longer than what most programs then do, and its compiler, which
an optimizer imports, would be imported by each of a program's ranks.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SECONDS = 300.0  # for one program
SERVER = """
import json, os, runpy, sys
import torch, torch._dynamo

for line in sys.stdin:
    folder, name, *files = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for descriptor, path in enumerate([os.devnull, *files]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
os.chdir(folder)
sys.argv, sys.path[0] = [name], folder
runpy.run_path(name, run_name="__main__")
"""


class FreshInterpreter:
    """Runs files where `environment` decides what can be imported."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._server: subprocess.Popen[str] | None = None

    def run(self, file: Path, output: Path) -> subprocess.CompletedProcess[str]:
        """What `python FILE` gives in the file's folder; `output` is for its words."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        files = [output / f"{file.name}.{stream}" for stream in ("out", "err")]
        asked = [str(file.parent), file.name, *map(str, files)]
        self._server.stdin.write(json.dumps(asked) + os.linesep)
        self._server.stdin.flush()
        ready, _, _ = select.select([self._server.stdout], [], [], SECONDS)
        answer = self._server.stdout.readline() if ready else ""
        if not answer:
            raise TimeoutError(f"{file.name} has not ended in {SECONDS:.0f} s")
        said = [path.read_text() for path in files]
        return subprocess.CompletedProcess([file.name], int(answer), *said)

    def close(self) -> None:
        """End it, whatever it runs."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
