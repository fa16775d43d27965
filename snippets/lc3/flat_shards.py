# python snippets/lc3/flat_shards.py
import torch

from xtrain.zero import FlatLayout

names = ["weight", "bias", "scale"]
shapes = [torch.Size([2, 5]), torch.Size([3]), torch.Size([])]
layout = FlatLayout(shapes, size=4)
print(layout.numel, "elements, padded to", layout.padded_numel)

flat = torch.zeros(layout.padded_numel)
flat[: layout.numel] = torch.arange(layout.numel)
for rank in range(4):
    shard = layout.shard(flat, rank)
    held = zip(names, layout.pieces(shard, rank), strict=True)
    words = [f"{name} {piece.tolist()}" for name, piece in held if piece.numel()]
    print(f"rank {rank} holds {shard.tolist()}: {', '.join(words)}")

for name, view in zip(names, layout.views(flat), strict=True):
    print(f"{name} again: {view.tolist()}")
