"""What the results of a test run are of: versions, and the machine without its name."""

import platform
from typing import Any

import torch

from xtrain.testing.backend_choice import Choice, Machine


def about(choice: Choice, machine: Machine) -> dict[str, Any]:
    """With GPUs their number and kind, and NCCL's version.

    Ranks of a world with more ranks than GPUs shared them.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": choice.backend,
        "device": choice.device,
    }
    if choice.device == "cuda":
        facts |= {"gpus": machine.gpus, "gpu": machine.name}
        facts["platform"] += f", {machine.gpus} x {facts['gpu']}"
    if choice.backend == "nccl" and machine.nccl:
        facts["nccl"] = ".".join(map(str, machine.nccl))
        facts["platform"] += f", NCCL {facts['nccl']}"
    return facts
