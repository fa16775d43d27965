"""Files that ranks share with their parent and that need no deletion.

On Linux the file lives in memory without a name (memfd) and other processes reach
it as /proc/PID/fd/N, so it disappears with the last process, also after kill -9.
Elsewhere it is a temporary file, removed by `close`.
"""

import os
import sys
import tempfile


class SharedFile:
    """An empty file with a `path` that child processes can open."""

    def __init__(self, name: str) -> None:
        if sys.platform == "linux":
            self._fd = os.memfd_create(name)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self.path = tempfile.mkstemp(prefix=f"xtrain-{name}-")

    def take(self) -> str:
        """Return the text written so far and empty the file.

        Writers must append, so that the next write starts at the new beginning.
        """
        size = os.fstat(self._fd).st_size
        if size == 0:
            return ""
        data = os.pread(self._fd, size, 0)
        os.ftruncate(self._fd, 0)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Close the file, and delete it where it has a name."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)
