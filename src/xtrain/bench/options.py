"""The words after `xtrain bench NAME`: its options, and sizes such as 16MiB."""

import argparse
import re
from pathlib import Path

from xtrain.bench.settings import QUICK, Settings

MOST_RANKS, MOST_BYTES = 64, 2**36
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain bench`."""
    parser.add_argument(
        "name", nargs="?", help="which set of races, such as lc1 (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="show all races")
    parser.add_argument(
        "--quick", action="store_true", help="few short samples, nothing written"
    )
    parser.add_argument(
        "--race", action="append", metavar="NAME", help="this race only; repeatable"
    )
    parser.add_argument(
        "--ranks",
        type=numbers,
        metavar="N,N",
        help="numbers of ranks instead of the race's own",
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="S,S",
        help="sizes instead of the race's own, such as 4KiB,16MiB",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"samples wanted of each contestant (default: {Settings().rounds}, with "
        f"--quick {QUICK.rounds})",
    )
    parser.add_argument(
        "--other-load-limit",
        type=float,
        metavar="SHARE",
        help="drop samples during which others used more of the machine than this "
        f"(default: {Settings().other_load_limit:g}, with --quick "
        f"{QUICK.other_load_limit:g} while some are left)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the record; by default docs/data/bench/NAME.json of the "
        "checkout for a full run, nowhere for a part of one",
    )
    parser.add_argument(
        "--another",
        action="store_true",
        help="this is another machine than that of the record: write NAME-2.json, or "
        "the next number, and leave the others; pages show what all machines gave",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the measurements of that record that have enough samples, run the "
        "others: for machines that are quiet only now and then",
    )


def numbers(text: str) -> list[int]:
    """`2,4`: numbers of ranks, 64 at most, as each is a process."""
    found = [int(part) for part in text.split(",")]
    if not all(1 <= ranks <= MOST_RANKS for ranks in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: numbers of ranks are from 1 to {MOST_RANKS}"
        )
    return found


def sizes(text: str) -> list[int]:
    """`4KiB,16MiB` in bytes."""
    found = [parse_size(part) for part in text.split(",")]
    if not all(1 <= size <= MOST_BYTES for size in found):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are from 1 B to 64 GiB")
    return found


def parse_size(text: str) -> int:
    """`16MiB` as 16777216. Units: B, KiB, MiB, GiB."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * unit
