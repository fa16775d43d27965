"""Worlds of several sizes, kept alive between tests but bounded in number."""

from xtrain.testing.world import World

# Sizes 1, 2, 3, 4 and 8 together; an idle forked rank keeps 10 MB of its own.
MAX_RANKS = 18


class Worlds:
    """Hands out one World per size; closes the least recently used ones.

    A World that was closed to make room starts again at its next run, so a test
    may hold several at once.
    """

    def __init__(self, backend: str, device: str, max_ranks: int = MAX_RANKS) -> None:
        self.backend = backend
        self.device = device
        self.max_ranks = max_ranks
        self._worlds: dict[int, World] = {}

    def get(self, size: int) -> World:
        """The World of this size."""
        world = self._worlds.pop(size, None) or World(size, self.backend, self.device)
        others = sum(self._worlds)
        while self._worlds and others + size > self.max_ranks:
            oldest = next(iter(self._worlds))
            self._worlds.pop(oldest).close()
            others -= oldest
        self._worlds[size] = world  # a dict keeps the order of use
        return world

    def close(self) -> None:
        """End all ranks."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
