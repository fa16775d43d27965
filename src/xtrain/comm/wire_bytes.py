"""What the TCP sockets of this process have sent, as the system counts it.

A backend's own headers are in these bytes, TCP/IP headers are not, nor what TCP had to
send again. Linux only (`TCP_INFO`, from Linux 4.19 on).
"""

import os
import socket
import struct
import sys


def tcp_bytes_sent() -> dict[int, int] | None:
    """Bytes sent so far by each TCP socket of this process, by inode; Linux only.

    On a busy machine TCP takes a late answer for a loss and sends a segment again:
    those bytes are no part of what the program sent.
    """
    if sys.platform != "linux":
        return None
    counts = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.stat(f"/proc/self/fd/{name}").st_ino
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    if len(info) >= 216:  # Linux 4.19 and newer
                        # tcpi_bytes_sent and, counted in it, tcpi_bytes_retrans
                        sent, again = struct.unpack_from("QQ", info, 200)
                        counts[inode] = sent - again
        except OSError:
            continue  # closed meanwhile, or not a TCP socket
    return counts


def bytes_sent_since(start: dict[int, int]) -> int:
    """What all sockets sent after `start`, an earlier `tcp_bytes_sent`."""
    now = tcp_bytes_sent() or {}
    return sum(count - start.get(inode, 0) for inode, count in now.items())
