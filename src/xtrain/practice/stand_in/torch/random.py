"""Random numbers, bit for bit those of torch on a CPU (Mersenne Twister)."""

import math
import random
from functools import lru_cache
from typing import Any

from torch import dtypes
from torch.base import flat_shape
from torch.tensors import Tensor, of_values

LENGTH = 624


@lru_cache(maxsize=256)
def first_state(seed: int) -> tuple[Any, ...]:
    """Of the generator, as Python keeps it."""
    state = [seed]
    for i in range(1, LENGTH):
        last = state[-1] ^ state[-1] >> 30
        state.append((1812433253 * last + i) & 0xFFFFFFFF)
    return 3, (*state, LENGTH), None


class Generator:
    """A stream of 32-bit numbers from a seed."""

    def __init__(self, device: Any = "cpu"):
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> "Generator":
        self.stream = random.Random(0)
        self.stream.setstate(first_state(seed & 0xFFFFFFFF))
        self.normal: float | None = None
        self.seed = seed
        return self

    def initial_seed(self) -> int:
        return self.seed

    def bits(self) -> int:
        return self.stream.getrandbits(32)

    def uniform(self) -> float:
        """From 0 up to 1, of 53 bits."""
        return ((self.bits() << 32 | self.bits()) & (1 << 53) - 1) * 2.0**-53

    def gauss(self) -> float:
        """One normal number; they come in pairs."""
        if self.normal is not None:
            found, self.normal = self.normal, None
            return found
        first, second = self.uniform(), self.uniform()
        radius = math.sqrt(-2 * math.log1p(-second))
        self.normal = radius * math.sin(2 * math.pi * first)
        return radius * math.cos(2 * math.pi * first)


default = Generator()
DRAWN: dict[tuple[Any, ...], tuple[list[float], Any, float | None]] = {}
"""What has been drawn already: ranks that are run again draw the same."""


def manual_seed(seed: int) -> Generator:
    """The seed of all that is drawn without a generator."""
    return default.manual_seed(seed)


def sixteen(values: list[float], at: int) -> None:
    """Sixteen uniform numbers become normal ones."""
    for i in range(at, at + 8):
        radius = math.sqrt(-2 * math.log(1 - values[i]))
        angle = 2 * math.pi * values[i + 8]
        values[i], values[i + 8] = radius * math.cos(angle), radius * math.sin(angle)


def normal(count: int, generator: Generator) -> list[float]:
    """As torch fills a float64 tensor: from 16 numbers on in blocks."""
    if count < 16:
        return [generator.gauss() for _ in range(count)]
    values = [generator.uniform() for _ in range(count)]
    for at in range(0, count - 15, 16):
        sixteen(values, at)
    if count % 16:
        values[-16:] = [generator.uniform() for _ in range(16)]
        sixteen(values, count - 16)
    return values


def randn(
    *shape: Any, generator: Generator | None = None, device: Any = None,
    dtype: Any = None, requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Normal numbers."""
    size = flat_shape(shape)
    used = generator or default
    key = used.seed, hash(used.stream.getstate()), used.normal, size
    if key not in DRAWN:
        values = normal(math.prod(size), used)
        DRAWN[key] = values, used.stream.getstate(), used.normal
    values, state, used.normal = DRAWN[key]
    used.stream.setstate(state)
    made = of_values(list(values), size, dtypes.float64)
    return made.to(dtype or dtypes.default)


def rand(
    *shape: Any, generator: Generator | None = None, device: Any = None,
    dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Uniform numbers."""
    size = flat_shape(shape)
    values = [(generator or default).uniform() for _ in range(math.prod(size))]
    return of_values(values, size, dtypes.float64).to(dtype or dtypes.default)


def randperm(
    n: int, generator: Generator | None = None, device: Any = None, dtype: Any = None
) -> Tensor:
    """A permutation of 0 to n - 1."""
    order = list(range(n))
    for i in range(n - 1):
        other = i + (generator or default).bits() % (n - i)
        order[i], order[other] = order[other], order[i]
    return of_values(order, (n,), dtypes.int64)


def randint(
    low: int, high: Any, size: Any = None, generator: Generator | None = None,
    device: Any = None, dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Whole numbers from `low` to below `high`."""
    low, high, size = (0, low, high) if size is None else (low, high, size)
    shape = flat_shape((size,))
    used = generator or default
    values = [low + used.bits() % (high - low) for _ in range(math.prod(shape))]
    return of_values(values, shape, dtype or dtypes.int64)
