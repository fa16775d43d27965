"""Serve the built site on this machine, building it first if there is none.

    python -m xtrain_docs.serve [--port 8000] [--draft]

Standard library only; listens on the loopback address alone. `--check` only says
whether the port is free: `make site` asks before it builds.
"""

import argparse
import io
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from . import build, config


class Handler(SimpleHTTPRequestHandler):
    """Files of one folder, our page for what is missing, no line per request.

    What is outside (through a link, say) and folders without an index are missing.
    """

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address was printed once."""

    def send_head(self) -> io.BytesIO | BinaryIO | None:
        """Answer 404 for whatever does not lie in the folder."""
        try:
            path = Path(self.translate_path(self.path)).resolve()
            inside = path.is_relative_to(Path(self.directory).resolve())
        except (ValueError, OSError, RuntimeError):  # a NUL, too long, links in a ring
            inside = False
        if not inside:
            self.send_error(404)
            return None
        return super().send_head()

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
