"""Serve the built site on this machine, building it first if there is none.

    python -m xtrain_docs.serve [--port 8000] [--draft]

Standard library only; listens on the loopback address alone. `--check` only says
whether the port is free: `make site` asks before it builds.
"""

import argparse
import gzip
import io
import os
import re
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from . import build, config
from .generated import kept_by_file

DIGEST = re.compile(r"[.-][0-9a-f]{8}\.")
"""In the name of a file whose content never changes: another content, another name."""


PACKED = {".css", ".html", ".js", ".json", ".mjs", ".py", ".svg", ".txt", ".wasm",
          ".xml"}  # fmt: skip
SHORT = 512
"""Files below this many bytes travel as they are."""


@kept_by_file
def packed(path: Path) -> bytes:
    """A file in its gzip form."""
    return gzip.compress(path.read_bytes(), 6, mtime=0)


def accepts_gzip(header: str | None) -> bool:
    """Does an Accept-Encoding header allow gzip?"""
    for part in (header or "").split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class Handler(SimpleHTTPRequestHandler):
    """Files of one folder, our page for what is missing, no line per request.

    What is outside (through a link, say) and folders without an index are missing. A
    browser that takes gzip gets text so. It may keep for good what has a digest in its
    name, and asks before it uses anything else again.
    """

    protocol_version = "HTTP/1.1"  # one connection for many requests
    disable_nagle_algorithm = True  # head and body are two writes: send both at once
    timeout = 60

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address was printed once."""

    def send_head(self) -> io.BytesIO | BinaryIO | None:
        """Send the head of the answer; returns the file to send, if there is one.

        404 for whatever does not lie in the folder, 304 for what the browser has.
        """
        path = self._path()
        if path is None:
            self.send_error(404)
            return None
        if os.path.isdir(path):  # False, too, for a name that is too long
            if not urlsplit(self.path).path.endswith("/"):
                return super().send_head()  # redirects to the name with a slash
            path = path / "index.html"
        if not os.path.isfile(path):
            self.send_error(404)
            return None
        small = path.suffix in PACKED and path.stat().st_size >= SHORT
        return self._answer(
            path, small and accepts_gzip(self.headers["Accept-Encoding"])
        )

    def _path(self) -> Path | None:
        """The file or folder that is asked for; None when it is not in the site."""
        try:
            path = Path(self.translate_path(self.path)).resolve()
            inside = path.is_relative_to(Path(self.directory).resolve())
        except (ValueError, OSError, RuntimeError):  # a NUL, too long, links in a ring
            return None
        return path if inside else None

    def _answer(self, path: Path, pack: bool) -> io.BytesIO | BinaryIO | None:
        file: io.BytesIO | BinaryIO = path.open("rb")
        status = os.fstat(file.fileno())
        size = status.st_size
        if pack:
            file.close()
            small = packed(path)
            file, size = io.BytesIO(small), len(small)
        tag = f'"{status.st_mtime_ns:x}-{size:x}-{"gz" if pack else "raw"}"'
        known = tag in (self.headers["If-None-Match"] or "")
        self.send_response(304 if known else 200)
        self.send_header("ETag", tag)
        kept = "public, max-age=31536000, immutable" if DIGEST.search(path.name) else ""
        self.send_header("Cache-Control", kept or "no-cache")
        self.send_header("Vary", "Accept-Encoding")
        if known:
            file.close()
        else:
            self.send_header("Content-Type", self.guess_type(path))
            self.send_header("Content-Length", str(size))
            if pack:
                self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        return None if known else file

    def list_directory(self, path: str | os.PathLike[str]) -> None:
        """Say nothing of what a folder holds."""
        self.send_error(404)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Answer 404 with the site's own page."""
        page = Path(self.directory) / "404.html"
        if code != 404 or not page.is_file():
            super().send_error(code, message, explain)
            return
        body = page.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server for a folder on 127.0.0.1; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    handler = partial(Handler, directory=str(folder))
    made = ThreadingHTTPServer(("127.0.0.1", port), handler)
    made.daemon_threads = True
    return made


def try_server(folder: Path, port: int) -> ThreadingHTTPServer | None:
    """`server`, or None and a word of advice when the port cannot be had."""
    try:
        return server(folder, port)
    except (OSError, OverflowError) as problem:
        print(
            f"port {port} cannot be used ({getattr(problem, 'strerror', problem)}); "
            "choose another: make site PORT=8123\n"
            "(without make: --port 8123); 0 takes any that is free",
            file=sys.stderr,
        )
        return None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.serve")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--draft", action="store_true", help="the draft build")
    parser.add_argument(
        "--check", action="store_true", help="only say whether the port is free"
    )
    options = parser.parse_args(arguments)
    folder = config.BUILD / "draft" if options.draft else config.SITE
    made = try_server(folder, options.port)
    if made is None:
        return 1
    if options.check:
        made.server_close()
        return 0
    if not (folder / "index.html").is_file():
        status = build.main(["--draft"] if options.draft else [])
        if status:
            made.server_close()
            return status
    print(f"xtrain is at http://127.0.0.1:{made.server_port}/  (Ctrl-C ends it)")
    try:
        made.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        made.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
