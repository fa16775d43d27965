"""Serve the built site on this machine, building it first if there is none.

    python -m xtrain_docs.serve [--port 8000] [--draft]

Standard library only; listens on the loopback address alone.
"""

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from . import build, config


class Handler(SimpleHTTPRequestHandler):
    """Files of one folder, our page for what is missing, no line per request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address was printed once."""

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


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.serve")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--draft", action="store_true", help="the draft build")
    options = parser.parse_args(arguments)
    folder = config.BUILD / "draft" if options.draft else config.SITE
    if not (folder / "index.html").is_file():
        status = build.main(["--draft"] if options.draft else [])
        if status:
            return status
    try:
        made = server(folder, options.port)
    except OSError as problem:
        print(
            f"port {options.port} cannot be used ({problem.strerror}); "
            "choose another with --port, or --port 0 for any free one",
            file=sys.stderr,
        )
        return 1
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
