# python snippets/wrong/lc1/nccl_overwritten.py
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def wrong():
    on_the_cpu = dist.new_group(backend="gloo")
    buffer = torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        work = dist.isend(buffer, 1)
        dist.barrier(on_the_cpu)  # rank 1 reports that it has received
        buffer.zero_()  # the bug: this rank has not waited
        work.wait()
    else:
        dist.recv(buffer.zero_(), 0)
        dist.barrier(on_the_cpu)
    return buffer.tolist()


def right():
    buffer = torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        work = dist.isend(buffer, 1)
        work.wait()  # what is queued after this runs after the send
        buffer.zero_()
    else:
        dist.recv(buffer.zero_(), 0)
    return buffer.tolist()


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(2, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    print(f"{backend}, {program.__name__}:", error.reports[0].summary)
