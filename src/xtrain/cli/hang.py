"""`xtrain hang FILES...`: why a run hangs, from the files of flight recorders.

`xtrain hang lab`: recorded jobs to practise it on.
"""

import argparse
import re
import textwrap
from pathlib import Path

from xtrain.comm.flight_recorder_files import read_dumps
from xtrain.comm.flight_recorder_report import diagnose
from xtrain.practice.hang_lab import lab

LAB = "lab"
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "FILES are of xtrain.comm.flight_recorder (rank-0.json, ...) or of torch's own "
        "(TORCH_FR_BUFFER_SIZE set: nccl_trace_rank_0, ...), or folders of them. Exit "
        "code 1 if something is wrong, 0 if not. `xtrain hang lab` lists jobs to "
        "practise on, `lab 3` shows the third, `lab 3 --rank 1 --call send` answers: "
        "exit code 0 if that is right, 1 if not."
    )
    parser.add_argument("files", nargs="+", metavar="FILES")
    parser.add_argument("--rank", choices=lab.RANKS, help="lab: that is to blame")
    parser.add_argument(
        "--call", choices=lab.CALLS,
        help="lab: which it lacks, makes wrongly or too often; none: it is no hang",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="lab: write the files there"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what the files tell, or a part of the lab."""
    first, *rest = arguments.files
    answer = arguments.rank, arguments.call
    if first == LAB:
        if rest in ([], ["list"]):
            lines = [f"{n:2}  {one.title}" for n, one in enumerate(lab.faults(), 1)]
            print(*lines, "\n`xtrain hang lab NUMBER` shows what a job left.", sep="\n")
            return 0
        if len(rest) > 1:
            raise ValueError(f"the lab shows one job, not {len(rest)}")
        return try_fault(lab.fault(rest[0]), answer, arguments.output)
    if any(answer) or arguments.output:
        raise ValueError("--rank, --call and -o belong to `xtrain hang lab NUMBER`")
    report = diagnose(read_dumps(map(Path, arguments.files)))
    print(report)
    return int(report.fault)


def try_fault(
    one: lab.Fault, answer: tuple[str | None, str | None], folder: Path | None
) -> int:
    """Show a job, or judge an answer."""
    rank, call = answer
    if rank and call:
        judgement = lab.judge(one, rank, call)
        print(plain(judgement.words))
        if judgement.right:
            print(f"\nxtrain hang tells:\n{lab.report(one)}\n\nThe job:\n{one.source}")
        return 0 if judgement.right else 1
    if rank or call:
        raise ValueError("an answer has both --rank and --call")
    print(f"{one.title}\n\nOutput:\n{lab.output(one)}\n")
    print(f"Flight recorders (group/number call: state):\n{lab.calls(one)}\n")
    if folder:
        lab.write_dumps(one, folder)
        print(f"Their files: {folder}")
    print(f"Who is to blame? --rank {'|'.join(lab.RANKS)} --call {'|'.join(lab.CALLS)}")
    return 0


def plain(words: str) -> str:
    """Markdown for a terminal: without links, at 80 columns."""
    paragraphs = LINK.sub(r"\1", words).split("\n\n")
    return "\n".join(textwrap.fill(one, 80) for one in paragraphs)
