"""The `xtrain` command.

A subcommand is a module with `add_arguments(parser)` and `run(arguments) -> int`.
It is imported only when it is asked for, so that `xtrain --help` needs no torch. To
add one, write the module and put its line into `COMMANDS`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import xtrain


class Command(NamedTuple):
    """One subcommand: the module that has it, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "doctor": Command("xtrain.doctor.command", "say what this machine can run"),
    "copy": Command("xtrain.copying.command", "hand out code that runs without xtrain"),
    "schedule": Command(
        "xtrain.schedules.command", "show and time a pipeline schedule"
    ),
    "plan": Command("xtrain.plan_command", "choose a layout for a model and devices"),
    "bench": Command("xtrain.bench.command", "race our code against the usual choice"),
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `chosen` one only."""
    parser = argparse.ArgumentParser(
        prog="xtrain", description="Distributed training, from scratch and tested."
    )
    parser.add_argument(
        "--version", action="version", version=f"xtrain {xtrain.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.help, description=_sentence(command.help)
        )
        if name == chosen:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `xtrain` command and return its exit code.

    Args:
        argv: the words after `xtrain`; None takes them from the command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(chosen)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
