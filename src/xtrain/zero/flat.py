"""Parameters laid end to end, padded, and cut into equal shards.

    parameters   | a a a a a | b b b | c c c c c c |          14 elements
    flat         a a a a a b b b c c c c c c . .              padded to 16 for 4 ranks
    shards       a a a a|a b b b|c c c c|c c . .

Where a cut falls means nothing to the optimizer, which works element by element, so any
shapes on any number of ranks make equal shards, and one collective serves them all.
"""

from dataclasses import dataclass

from torch import Size, Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in the flat vector: elements start to stop."""

    start: int
    stop: int
    shape: Size


class FlatLayout:
    """Where each of some tensors lies in their flat vector, and in each rank's shard.

    Args:
        shapes: of the tensors, in order.
        size: number of ranks.
    """

    def __init__(self, shapes: list[Size], size: int):
        self.size = size
        self.slots: list[Slot] = []
        end = 0
        for shape in shapes:
            start, end = end, end + shape.numel()
            self.slots.append(Slot(start, end, shape))
        self.numel = end
        self.shard_numel = -(-end // size)
        self.padded_numel = self.shard_numel * size

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of a flat vector of `padded_numel` (or `numel`)."""
        return [flat[s.start : s.stop].view(s.shape) for s in self.slots]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's shard as a view of the padded flat vector."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def piece_bounds(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Which elements of one tensor a rank holds: bounds within that tensor."""
        low = rank * self.shard_numel
        start = min(max(slot.start, low), slot.stop)
        stop = max(min(slot.stop, low + self.shard_numel), start)
        return start - slot.start, stop - slot.start

    def pieces(self, shard: Tensor, rank: int) -> list[Tensor]:
        """What a rank's shard holds of each tensor: flat views, some of them empty."""
        low = rank * self.shard_numel
        result = []
        for slot in self.slots:
            first, last = self.piece_bounds(slot, rank)
            offset = min(max(slot.start - low, 0), self.shard_numel)
            result.append(shard[offset : offset + last - first])
        return result
