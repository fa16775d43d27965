# torchrun --nproc-per-node 4 snippets/lc8/one_run.py
import io
import json
import shutil
import tempfile
from contextlib import redirect_stdout

import torch.distributed as dist

from xtrain.train.overrides import overridden
from xtrain.train.recipes import dense_bytes
from xtrain.train.run import train

OPTIONS = """
    --dtype=float64 --global-batch=8 --data.sequence=48
    --model.hidden-size=48 --model.intermediate-size=96 --model.num-attention-heads=4
    --model.initializer-range=0.02 --optimizer.lr=1e-2 --sample.prompt=none
    --rate.kind=constant --rate.warmup=4
"""
HERE = "--layout.data=2 --layout.tensor=2 --layout.zero=3"
ELSEWHERE = "--layout.pipeline=2 --layout.context=2 --layout.micro-batches=4"
STOP, STEPS = 12, 24


def one_run(folder: str, here: str, elsewhere: str) -> list[dict]:
    """Half of the steps in one layout, the others in another; the lines of the log."""
    if dist.get_rank() == 0:
        shutil.copy("LICENSE", folder)  # its tokens are kept beside it
    dist.barrier()
    files = f"--checkpoint.folder={folder} --log.jsonl={folder}/log.jsonl"
    files += f" --data.path={folder}/LICENSE"
    for layout, steps in ((here, STOP), (elsewhere, STEPS)):
        words = f"{OPTIONS} {files} {layout} --steps={steps}".split()
        with redirect_stdout(io.StringIO()):  # its times differ from run to run
            train(overridden(dense_bytes(), words))
    with open(f"{folder}/log.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    # In float64 on CPUs, the same digits are printed everywhere.
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    lines = one_run(folder[0], HERE, ELSEWHERE)
    for line in lines if dist.get_rank() == 0 else []:
        sent = "  ".join(f"{axis} {n:,}" for axis, n in line["bytes"].items())
        print(
            f"{line['step']:2}  loss {line['loss']:.6f}  norm {line['grad_norm']:.6f}"
            f"  lr {line['lr']:.1e}  {sent}"
        )
    dist.destroy_process_group()
