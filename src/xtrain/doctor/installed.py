"""Is what xtrain needs installed, in versions that do?"""

import platform
import sys
from importlib import metadata
from pathlib import Path

import xtrain
from xtrain.doctor.finding import Finding

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)


def check_python() -> Finding:
    version = platform.python_version()
    text = f"{version} on {platform.platform(terse=True)} ({sys.executable})"
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return Finding("python", "problem", f"{text}: xtrain needs 3.11 or newer")
    return Finding("python", "ok", text)


def check_name() -> Finding:
    """Is the other project that is called xtrain on PyPI installed, too?"""
    ours = Path(xtrain.__file__).resolve()
    text = f"{xtrain.__version__} in {ours.parent}"
    try:
        other = metadata.distribution("xtrain")
    except metadata.PackageNotFoundError:
        return Finding("xtrain", "ok", text)
    files = [Path(str(other.locate_file(file))) for file in other.files or []]
    theirs = [f.resolve() for f in files if f.parts[-2:] == ("xtrain", "__init__.py")]
    if ours in theirs:
        return Finding(
            "xtrain",
            "problem",
            f"another project's xtrain {other.version} was installed over this one: "
            "pip uninstall xtrain, then install this one again",
        )
    if theirs:
        text += (
            f"; hides another project's xtrain {other.version} in {theirs[0].parent}"
        )
        return Finding("xtrain", "note", text)
    return Finding("xtrain", "ok", text)


def check_torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "problem", f"cannot be imported: {error}")
    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        return Finding("torch", "problem", f"{version}: xtrain needs 2.11 or newer")
    if not torch.distributed.is_available():
        return Finding("torch", "problem", f"{version} has no torch.distributed")
    return Finding("torch", "ok", f"{version} ({_build()})")


def _build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    return f"ROCm {torch.version.hip} build" if torch.version.hip else "CPU build"


def check_numpy() -> Finding:
    try:
        import numpy
    except ImportError:
        return Finding(
            "numpy", "problem", "missing; torch's object collectives need it"
        )
    return Finding("numpy", "ok", numpy.__version__)
