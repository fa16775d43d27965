"""`xtrain launch`: the file that starts a run on many machines, on standard output.

    xtrain launch --engine slurm --nodes 1 bytes --layout.data=8 > job.sbatch

Words that are no options of it are those of `xtrain train`.
"""

import argparse

from xtrain.cli import Defaults, Parser

ENGINES = ("torchrun", "slurm", "kubeflow", "jobset", "ray")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All words as they are: our options, a recipe, and its options."""
    parser.add_argument("words", nargs="*", metavar="RECIPE --NAME=VALUE")


def options() -> argparse.ArgumentParser:
    """The parser of the options that are not the recipe's."""
    parser = Parser(
        prog="xtrain launch",
        usage="xtrain launch --engine ENGINE [options] RECIPE [--NAME=VALUE ...]",
        description="Write a file that starts a run on many nodes.",
        epilog="RECIPE and --NAME=VALUE are those of xtrain train.",
        formatter_class=Defaults,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engine", required=True, choices=ENGINES, help="what reads the file")
    add("--nodes", type=int, default=1, metavar="N", help="machines")
    add("--min-nodes", type=int, metavar="N", help="with which the run goes on")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="ranks of each")
    add("--name", default="xtrain", help="of the job, a DNS label")
    add("--hours", type=float, default=24.0, help="its limit, on Slurm and Kubernetes")
    add("--max-restarts", type=int, default=3, metavar="N", help="after failures")
    add("--port", type=int, default=29400, help="of the rendezvous, on node 0")
    add("--folder", default="/shared", help="storage that all nodes see")
    add("--claim", default="shared", help="its PersistentVolumeClaim, on Kubernetes")
    add("--image", default="xtrain:latest", help="of the container, on Kubernetes")
    add("--env", action="append", metavar="NAME=VALUE", help="a variable of ranks")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the file."""
    found, words = options().parse_known_args(arguments.words)
    from xtrain.train.launch import ENGINES, Job

    if not words or words[0].startswith("-"):
        raise ValueError("no RECIPE, as bytes, before the options of the recipe")
    given = [pair.partition("=") for pair in found.env or []]
    unset = [name for name, equals, _ in given if not equals]
    if unset:
        raise ValueError(f"--env {unset[0]} is not of the form NAME=VALUE")
    settings = {
        name: value
        for name, value in vars(found).items()
        if name not in ("engine", "env")
    }
    job = Job(
        recipe=words[0],
        options=tuple(words[1:]),
        environment={name: value for name, _, value in given},
        **settings,
    )
    print(ENGINES[found.engine](job), end="")
    return 0
