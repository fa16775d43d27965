# python snippets/wrong/lc3/own_norm.py
import torch


def clip(shards, max_norm):
    """What every rank does with its own shards."""
    norm = torch.cat(shards).norm()  # the bug: the norm of a part
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for shard in shards:
        shard.mul_(factor)
    return norm


if __name__ == "__main__":
    for ranks in (1, 2, 4):
        gradient = torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0])
        for shard in gradient.chunk(ranks):  # each on a rank of its own
            clip([shard], max_norm=1.0)
        values = " ".join(f"{value:.2f}" for value in gradient.tolist())
        print(f"{ranks} ranks: norm {gradient.norm():.2f}, gradient {values}")
