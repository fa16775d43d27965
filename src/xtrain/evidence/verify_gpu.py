"""All lectures and the support matrix under NCCL, and a record of it to send.

    make verify-gpu                            with any number of GPUs, one included
    python -m xtrain.evidence.verify_gpu -k ring      further words go to pytest

Worlds with more ranks than GPUs share them where NCCL allows it (2.30), and are skipped
with that reason elsewhere.
"""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.evidence import results
from xtrain.evidence.store import Store

# The folders whose tests take their ranks from the session's backend.
FOLDERS = (
    "comm", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel",
    "context_parallel", "expert_parallel", "model", "checkpoint", "whiteboard",
    "matrix", "testing", "evidence",
)  # fmt: skip
WORKERS = 4  # each keeps ranks with a CUDA context, half a GiB of memory a rank


def main(arguments: list[str]) -> int:
    """Run, keep the record; returns pytest's exit code, 2 without a GPU."""
    if not torch.cuda.device_count() or not dist.is_nccl_available():
        print("no GPU that torch and NCCL can use: xtrain doctor says what is missing")
        return 2
    folders = [str(path) for name in FOLDERS if (path := Path("tests", name)).is_dir()]
    options = ["-q", "-rs", "-n", str(WORKERS), "--backend", "nccl"]
    command = [sys.executable, "-m", "pytest", *options, *folders, *arguments]
    print(" ".join(command), flush=True)
    code = subprocess.run(command).returncode
    written = Store(Path("build", results.FOLDER, "nccl-cuda.json"), Path())
    if code == 0:
        print(keep(written))
    else:
        print(f"\nNot kept, as a test failed. What pytest says of it, and "
              f"{written.path}, are worth an issue of their own.")  # fmt: skip
    return code


def keep(written: Store) -> str:
    """Copy the record to where the pages look; how to send it."""
    tests = results.by_symbol(written.read()).values()
    proved = sum(any(test.passed for test in each) for each in tests)
    gpu = written.about()["platform"].rpartition(" x ")[2].partition(",")[0]
    name = "-".join(gpu.lower().split()) or "gpu"
    target = Path("docs/data", results.FOLDER, f"nccl-{name}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(written.path.read_text())
    return (
        f"\n{proved} functions and classes ran under NCCL. The record is {target}."
        " The pages of your checkout show it from now on. To send it: commit that one"
        " file and open a pull request."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
