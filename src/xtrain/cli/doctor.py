"""`xtrain doctor`: what this machine can run, one line for each finding.

The exit code is 1 when there is a problem, else 0.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from xtrain.cli import doctor_checks as checks
from xtrain.cli.doctor_checks import Finding


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
    what = "the tests" if checks.checkout() else "xtrain"
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif problems:
        print(f"\n{problems} to repair before {what} can run.")
    elif checks.checkout():
        print("\nThis machine can run the tests: make test")
    else:
        print("\nThis machine can run xtrain; its tests come with the source.")
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """All findings in order. Without torch, what needs it is left out."""
    yield checks.check_python()
    yield checks.check_name()
    torch_finding = checks.check_torch()
    yield torch_finding
    yield checks.check_loopback()
    if torch_finding.state == "ok":
        yield checks.check_numpy()
        yield checks.check_gpus()
        yield checks.check_backends()
        yield checks.check_nccl()
        yield checks.check_sharing()
        yield checks.check_gloo()
        for backend in checks.OWN_BACKENDS:
            yield checks.check_backend(backend)
    yield checks.check_record()
