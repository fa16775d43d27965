"""Two network namespaces stand for two hosts, each with its address and host name.

    host a, 10.77.0.1  ---- virtual cable ----  host b, 10.77.0.2

torchrun starts one rank on each; then the cable is cut.
"""

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SCRIPT = Path(__file__).with_name("two_hosts.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two connected namespaces."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("namespaces are made with ip (iproute2) and unshare")
    names = [f"xtrain{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
            cable = ["link", "add", "cable", "netns", names[0], "type", "veth"]
            ip(*cable, "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names


class Node:
    """torchrun in one namespace; `hear()` is the next line that its rank printed."""

    def __init__(self, number: int, name: str):
        self._name, address = name, ADDRESSES[number]
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--node-rank", str(number), "--local-addr",
            address, "--master-addr", ADDRESSES[0], "--master-port", "29577",
            str(SCRIPT),
        ]  # fmt: skip
        # Another host name: the ranks must not take each other for neighbours.
        inside = ["sh", "-c", f'hostname host{number}; exec "$@"', "sh", *torchrun]
        environment = os.environ | {
            "XTRAIN_SOCKET_ADDRESS": address,
            "XTRAIN_SECRET": "the secret of both hosts",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SOURCE),
        }
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", *inside],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._seen: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def hear(self, word: str) -> str:
        """The next line that begins with `word`."""
        while True:
            try:
                line = self._lines.get(timeout=60)
            except queue.Empty:
                raise AssertionError(f"no {word!r} after {self._seen}") from None
            self._seen.append(line)
            if line.startswith(word):
                return line

    def end(self) -> None:
        """End every process of this host: torchrun and its rank."""
        for pid in ip("netns", "pids", self._name).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_two_hosts_reduce_train_and_notice_the_cut(hosts):
    with ExitStack() as undo:
        nodes = []
        for number, name in enumerate(hosts):
            nodes.append(Node(number, name))
            undo.callback(nodes[-1].end)
        for node in nodes:
            assert node.hear("sum") == "sum 3.0"
            assert node.hear("gradient") == "gradient 0.5 0.5 0.5"
            node.hear("ready")
        ip("-n", hosts[1], "link", "set", "cable", "down")
        cut = time.monotonic()
        for number, node in enumerate(nodes):
            line = node.hear("raised")
            assert f"rank {1 - number} is gone (its connection ended)" in line
            assert f"while rank {number} waited in all_reduce([262144] float32" in line
            assert "two_hosts.py:" in line
            print(f"host {number} knew after {time.monotonic() - cut:.1f} s")
