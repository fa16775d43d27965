# python snippets/wrong/lc4/fan_in_of_the_shard.py
import torch
from torch import nn


def column_slice(out_features, in_features, rank, size):
    """This rank's columns [O, K / N] of a row-parallel weight."""
    torch.manual_seed(rank)  # another draw on each rank
    return nn.Linear(in_features // size, out_features).weight  # the bug: fan-in K / N


if __name__ == "__main__":
    for size in (1, 2, 4, 8):
        slices = [column_slice(256, 256, rank, size).detach() for rank in range(size)]
        std = torch.cat(slices, 1).std()
        print(f"{size} ranks: standard deviation of the whole weight {std:.4f}")
