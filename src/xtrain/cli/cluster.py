"""`xtrain cluster`: a script for torchrun on a virtual cluster, in this process."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.cluster import VirtualCluster

STOPS = """Options may follow SCRIPT. Words of the script that begin with - come after
--: xtrain cluster train.py --ranks 64 -- --lr 0.1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain cluster`."""
    parser.epilog = STOPS
    parser.allow_abbrev = False
    add_options(parser)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="run on each rank")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS", help="its")


def add_options(parser: argparse.ArgumentParser, given: object = None) -> None:
    def add(name: str, default: object, **settings: object) -> None:
        default = getattr(given, name[2:], default)
        parser.add_argument(name, default=default, **settings)  # type: ignore[arg-type]

    add("--ranks", 8, type=int, metavar="N", help="how many")
    add("--topology", "dgx_h100", metavar="T", help=(
        "dgx_h100, dgx_h100:NODES, nvlink, flat:LATENCY,BANDWIDTH, "
        "fat_tree:NODES,leaf=4,oversubscription=2, tpu_torus:4,4, none, or a table "
        "of links in FILE.json; as large as needed where no size is given"
    ))  # fmt: skip
    add("--accelerator", None, metavar="A", help=(
        "operators take the time that they would on it, as h100; without it they take "
        "none"
    ))  # fmt: skip
    add("--seed", None, type=int, metavar="N", help="draws another legal order")
    add("--svg", None, type=Path, metavar="FILE", help="timeline of the ranks")
    add("--trace", None, type=Path, metavar="FILE", help="the same for Perfetto")
    add("--heat", None, type=Path, metavar="FILE", help="load of each link, as SVG")


def run(arguments: argparse.Namespace) -> int:
    """Run the script, draw what was asked for, and print what it took."""
    arguments, words = split(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: ranks are on the CPU
    from xtrain.cluster import VirtualCluster
    from xtrain.cluster.script import NotAScript, run_script
    from xtrain.cluster.topology_text import topology_of

    if arguments.ranks < 1:
        raise ValueError(f"a cluster has at least one rank, got {arguments.ranks}")
    topology = topology_of(arguments.topology, arguments.ranks)
    cluster = VirtualCluster(
        arguments.ranks, topology, seed=arguments.seed, record=True,
        accelerator=arguments.accelerator,
    )  # fmt: skip
    if not arguments.script.is_file():
        raise ValueError(f"{arguments.script} is no file")
    nodes = topology is not None and topology.name.startswith(("dgx", "fat_tree"))
    try:
        run_script(cluster, arguments.script, words, per_node=8 if nodes else None)
    except (BrokenPipeError, NotAScript):
        raise
    except Exception as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return 1
    finally:
        write(cluster, arguments)
    report(cluster)
    return 0


def split(arguments: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Our options among the words after SCRIPT, and the words of the script."""
    words = list(arguments.words)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="xtrain cluster", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    add_options(parser, arguments)
    try:
        found, own = parser.parse_known_args(words[:at])
    except argparse.ArgumentError as problem:
        raise ValueError(str(problem)) from None
    unknown = [word for word in own if word.startswith("-")]
    if unknown:
        raise ValueError(
            f"no option {unknown[0]}; words of the script that begin with - come "
            f"after --: xtrain cluster {arguments.script} -- {unknown[0]}"
        )
    found.script = arguments.script
    return found, own + words[at + 1 :]


def write(cluster: "VirtualCluster", arguments: argparse.Namespace) -> None:
    """The pictures, also of a run that failed."""
    from xtrain.cluster.chrome_trace import chrome_trace
    from xtrain.cluster.draw import timeline_svg
    from xtrain.cluster.heat import heat_svg

    record, name = cluster.record, arguments.script.name
    if record is None:
        return
    if arguments.svg:
        arguments.svg.write_text(timeline_svg(record, name, width=960))
    if arguments.trace:
        arguments.trace.write_text(chrome_trace(record, name))
    if arguments.heat:
        arguments.heat.write_text(heat_svg(record, f"{name}: load of the links"))


def report(cluster: "VirtualCluster") -> None:
    """Virtual seconds, bytes, and the links that were used most."""
    from xtrain.cluster.amounts import in_words
    from xtrain.cluster.heat import busiest, describe

    record, topology = cluster.record, cluster.topology
    if record is None:
        return
    seconds, last = record.makespan, record.seconds.index(record.makespan)
    kinds: dict[str, list[int]] = {}
    for one in record.transfers:
        kinds.setdefault(one.kind, []).append(one.nbytes)
    where = topology.name if topology else "no topology"
    rows = [
        ("ranks", f"{cluster.size} on {where}"),
        ("virtual time", f"{in_words(seconds, 's')} (rank {last} ends last)"),
        ("compute, at most", in_words(max(
            record.total(rank, "compute") for rank in range(cluster.size)
        ), "s")),
        *((f"{kind}s" if kind == "message" else kind,
           f"{len(sizes)}, {in_words(sum(sizes), 'B')} in all")
          for kind, sizes in kinds.items()),
        *(("busiest link" if not place else "", describe(name, use, share))
          for place, (name, use, share) in enumerate(busiest(record, 3))),
    ]  # fmt: skip
    print()
    for name, value in rows:
        print(f"{name:<17} {value}")
