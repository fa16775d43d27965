# python snippets/wrong/lc3/muon_on_shards.py
import torch

from xtrain.zero import newton_schulz


def updates(shards):
    """What every rank adds to its rows of a matrix."""
    return [newton_schulz(shard) for shard in shards]  # the bug: of a part


if __name__ == "__main__":
    torch.manual_seed(0)
    momentum = torch.randn(8, 8) + 3 * torch.ones(8, 8)  # most of it is one direction
    for ranks in (1, 2, 4, 8):
        update = torch.cat(updates(momentum.chunk(ranks))).float()
        values = " ".join(f"{value:.1f}" for value in torch.linalg.svdvals(update))
        print(f"{ranks} ranks: singular values of the update {values}")
