# torchrun --nproc-per-node 2 snippets/lc1/life_of_a_tensor.py
import sys
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

import xtrain
from xtrain.comm import ring_all_reduce

ROOT = Path(xtrain.__file__).parent
calls: list[tuple[str, str]] = []


def note(frame, event, argument):
    file = Path(frame.f_code.co_filename)
    name = frame.f_code.co_name
    if event == "call" and file.is_relative_to(ROOT) and name[0] != "<":
        calls.append((str(file.relative_to(ROOT)), name))


# Which files and functions of xtrain does a tensor pass in a ring all-reduce?
# On gloo: with NCCL both messages of a step go out in one batch.
dist.init_process_group("gloo")
tensor = torch.ones(4)
ring_all_reduce(tensor)  # the first call asks torch what it can sum, and remembers
sys.setprofile(note)
ring_all_reduce(tensor)
sys.setprofile(None)

if dist.get_rank() == 0:
    for file, found in groupby(dict.fromkeys(calls), key=lambda call: call[0]):
        print(f"{file:22} {', '.join(name for _, name in found)}")
    print(f"{len({file for file, _ in calls})} files, {len(set(calls))} functions")
dist.barrier()
dist.destroy_process_group()
