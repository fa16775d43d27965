"""The machine a race ran on, and how busy others keep it.

    busy since boot, all processes      cpu seconds of the ranks
    ------------------------------  -   ------------------------  =  other load
    length of the sample x cores        length of the sample x cores

A sample during which others used more than a few percent of the machine is dropped and
counted. What ranks send each
other on one host is partly carried by threads of the Linux kernel (ksoftirqd): their
time belongs to the contestant, not to other load.
"""

import contextlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")
_STAT = _PROCESSES / "stat"
_ACCOUNT = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")


class BusyClock:
    """Reads the CPU seconds that all processes of this machine used so far.

    `known` is False where the system does not tell (everywhere but Linux); `read`
    then returns 0. `resolution` is the step, in seconds, in which a core's time
    grows: next to nothing with the exact account, a scheduler tick without it.
    """

    def __init__(self) -> None:
        self.known = _STAT.exists()
        self.resolution = 0.0
        self._account = False
        if not self.known:
            return
        tick = 1 / os.sysconf("SC_CLK_TCK")
        worked, _ = _ticks()
        with contextlib.suppress(OSError, ValueError):
            # Inside a container the account may hold the container's work only.
            self._account = _account_seconds() > 0.9 * worked * tick
        self.resolution = 0.0 if self._account else tick
        # The ticks of processes leave network work out; the exact account has it.
        self._carriers = list(_carriers()) if self._account else []

    def read(self) -> float:
        """CPU seconds since boot; time that the hypervisor took away included."""
        if not self.known:
            return 0.0
        worked, stolen = _ticks()
        tick = 1 / os.sysconf("SC_CLK_TCK")
        if not self._account:
            return (worked + stolen) * tick
        carried = sum(int(path.read_text().split()[0]) for path in self._carriers)
        return stolen * tick + _account_seconds() - carried * 1e-9


def _ticks() -> tuple[int, int]:
    """Scheduler ticks of all cores: spent on processes, and stolen."""
    with _STAT.open() as lines:
        fields = [int(field) for field in next(lines).split()[1:]]
    return sum(fields[:3]), fields[7] if len(fields) > 7 else 0


def _account_seconds() -> float:
    return int(_ACCOUNT.read_text()) * 1e-9


def _carriers() -> Iterator[Path]:
    """Nanoseconds (first number) of each kernel thread that carries network work."""
    for name in _PROCESSES.glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            figures = name.with_name("schedstat")
            if name.read_text().startswith("ksoftirqd/") and figures.exists():
                yield figures


def cores() -> int:
    """Cores of the machine (not only those this process may use)."""
    return os.cpu_count() or 1


def describe() -> dict[str, object]:
    """The machine's properties that matter for the figures, without its name."""
    return {
        "cores": cores(),
        "cpu": _cpu_model(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "tcp": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def facts() -> dict[str, float]:
    """What decides most races of small and of large messages, measured now.

    "wake_seconds": a byte to another process through a pipe and back, the median: two
    wake-ups. "copy_bytes_per_second": one core copying a tensor far larger than caches.
    """
    return {
        "wake_seconds": _round_trip_seconds(),
        "copy_bytes_per_second": _copy_rate(),
    }


def _round_trip_seconds(rounds: int = 2000) -> float:
    there, back = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # echoes until the other end is closed
        os.close(there[1])
        while word := os.read(there[0], 1):
            os.write(back[1], word)
        os._exit(0)
    os.close(there[0])
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        os.write(there[1], b"x")
        os.read(back[0], 1)
        times.append(time.perf_counter() - began)
    for descriptor in (there[1], *back):
        os.close(descriptor)
    os.waitpid(child, 0)
    return statistics.median(times)


def _copy_rate(nbytes: int = 64 << 20, rounds: int = 15) -> float:
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times)


def versions() -> dict[str, str]:
    """Versions of what took part."""
    import torch

    import xtrain

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "xtrain": xtrain.__version__,
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
