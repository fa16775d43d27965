"""The `xtrain` command."""

import argparse
from collections.abc import Sequence

import xtrain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `xtrain` command and return its exit code."""
    parser = argparse.ArgumentParser(prog="xtrain")
    parser.add_argument(
        "--version", action="version", version=f"xtrain {xtrain.__version__}"
    )
    parser.parse_args(argv)
    parser.print_help()
    return 0
