# python snippets/wrong/lc1/nccl_bitwise.py
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def finite_layers():
    """Of three layers: is the gradient free of inf and NaN on this rank?"""
    return torch.tensor([1, 1, dist.get_rank()])


def wrong():
    finite = finite_layers()
    dist.all_reduce(finite, dist.ReduceOp.BAND)  # the bug: NCCL has no BAND
    return finite.tolist()


def right():
    finite = finite_layers()
    dist.all_reduce(finite, dist.ReduceOp.MIN)  # of zeros and ones, the same
    return finite.tolist()


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(2, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    print(f"{backend}, {program.__name__}:", error.reports[0].summary)
