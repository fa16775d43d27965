# python snippets/wrong/lc1/nccl_tags.py
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def pass_on(order):
    """Rank 0 sends loss and tokens, rank 1 receives them in this order of tags."""
    values = {1: torch.tensor([0.5]), 2: torch.tensor([4096.0])}
    if dist.get_rank() == 0:
        works = [dist.isend(values[tag], 1, tag=tag) for tag in (1, 2)]
    else:
        works = [dist.irecv(values[tag].zero_(), 0, tag=tag) for tag in order]
    for work in works:
        work.wait()
    return [tensor.item() for tensor in values.values()]


def wrong():
    return pass_on((2, 1))  # the bug: only the tags say which is which


def right():
    return pass_on((1, 2))  # as they are sent


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(2, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    print(f"{backend}, {program.__name__}:", error.reports[1].summary)
