"""The command `xtrain doctor`: run every check and print what it found.

The exit code is 1 when there is a problem, else 0.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from xtrain.doctor.finding import Finding, checkout
from xtrain.doctor.gpus import check_gpus, check_nccl, check_sharing
from xtrain.doctor.installed import check_name, check_numpy, check_python, check_torch
from xtrain.doctor.ranks import (
    OWN_BACKENDS,
    check_backend,
    check_backends,
    check_gloo,
    check_loopback,
)
from xtrain.doctor.record import check_record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain doctor`."""
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 when one of them is a problem."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not arguments.json:
            mark = {"ok": "ok  ", "note": "note", "problem": "FAIL"}[finding.state]
            print(f"{mark}  {finding.name:<13} {finding.text}", flush=True)
    problems = sum(finding.state == "problem" for finding in findings)
    what = "the tests" if checkout() else "xtrain"
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif problems:
        print(f"\n{problems} to repair before {what} can run.")
    elif checkout():
        print("\nThis machine can run the tests: make test")
    else:
        print("\nThis machine can run xtrain; its tests come with the source.")
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """All findings in order. Without torch, what needs it is left out."""
    yield check_python()
    yield check_name()
    torch_finding = check_torch()
    yield torch_finding
    yield check_loopback()
    if torch_finding.state == "ok":
        checks: list[Callable[[], Finding]] = [
            check_numpy,
            check_gpus,
            check_backends,
            check_nccl,
            check_sharing,
            check_gloo,
        ]
        for check in checks:
            yield check()
        for backend in OWN_BACKENDS:
            yield check_backend(backend)
    yield check_record()
