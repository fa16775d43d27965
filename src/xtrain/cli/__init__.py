"""The `xtrain` command: `main` runs one of its subcommands.

A subcommand is a module of this folder with `add_arguments(parser)` and
`run(arguments) -> int`. It is imported only when it is called, so that `xtrain --help`
needs no torch. To add one, write the module and put its line into `COMMANDS`.

A ValueError or OSError of a command becomes one line on standard error and exit code 2.
A closed pipe (`| head`) ends a command with exit code 0.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import xtrain

LONGEST = 200  # characters of an error
OWN_OPTIONS = {"train", "launch"}
"""Commands whose options are not known to argparse: it takes them for names."""
NO_DEFAULT = (None, False, argparse.SUPPRESS)

COMMANDS = {  # its module, and its line in the help
    "doctor": ("xtrain.cli.doctor", "print what this machine can run"),
    "copy": ("xtrain.cli.copying", "write code that runs without xtrain"),
    "schedule": ("xtrain.cli.schedule", "show and time a pipeline schedule"),
    "plan": ("xtrain.cli.plan", "choose a layout for a model and devices"),
    "cluster": ("xtrain.cli.cluster", "run a script for torchrun on virtual ranks"),
    "train": ("xtrain.cli.train", "train a model, in any layout"),
    "launch": ("xtrain.cli.launch", "write a file that starts a run on many nodes"),
    "drill": ("xtrain.cli.drill", "write algorithms by hand, with a checker"),
    "hang": ("xtrain.cli.hang", "say why a run hangs, from its flight recorders"),
    "bench": ("xtrain.cli.bench", "race our code against the usual choice"),
}


class Defaults(argparse.HelpFormatter):
    """Adds its default to the help of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help and action.option_strings and action.default not in NO_DEFAULT:
            return f"{action.help} (default: %(default)s)"
        return action.help


class Parser(argparse.ArgumentParser):
    """An error of usage is one line, as those of the commands are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, refusal(self.prog, message) + "\n")


def refusal(prog: str, problem: object) -> str:
    """The error as one line of at most `LONGEST` characters."""
    if isinstance(problem, OSError) and problem.filename is not None:
        problem = f"{problem.strerror}: {problem.filename}"
    line = " ".join(f"{prog}: {problem}".split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `chosen` one only."""
    parser = Parser(
        prog="xtrain", description="Distributed training, from scratch and tested."
    )
    parser.add_argument(
        "--version", action="version", version=f"xtrain {xtrain.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, text) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            formatter_class=Defaults,
            prefix_chars="\0" if name in OWN_OPTIONS else "-",
            add_help=name not in OWN_OPTIONS,
        )
        if name == chosen:
            module = import_module(module_name)
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
    code = 0
    try:
        code = int(arguments.run(arguments))
        print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as of `| head`
        _drop_output()
    except (ValueError, OSError) as problem:
        try:
            print(refusal(f"xtrain {arguments.command}", problem), file=sys.stderr)
            print(end="", flush=True)
        except OSError:  # a full disk
            _drop_output()
        return 2
    return code


def _drop_output() -> None:
    """Discard buffered output: Python would fail to flush it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
