"""Seconds of what one device computes: products, attention, element-wise passes.

    a product     2 m k n / (share x peak)  +  thin x bytes / memory bandwidth
    attention     flops / (share x peak)  +  exponentials / their rate
      unfused     two products of all pairs, and the scores through memory
    element-wise  bytes / memory bandwidth

The second term of a product is the loss of small and thin ones, by the same law on all
devices: over the first it is thin x share x (1/m + 1/n + 1/k) x peak / bandwidth.

Sources: Williams et al., Roofline, CACM 2009; Dao, FlashAttention-2, 2023, and Shah et
al., FlashAttention-3, 2024 (five products in backward, the price of exponentials);
Korthikanti et al., 2022 (unfused attention).
"""

from collections.abc import Iterable

from xtrain.plan.checks import require_one_of
from xtrain.plan.hardware import Accelerator
from xtrain.plan.time_constants import MATMUL, TimeConstants

ATTENTION = ("flash", "older flash", "unfused")
HALF, FULL = 2, 4
ALIGNED = 8
"""Elements of 16 bytes, which tensor cores load at once."""


class Kernels:
    """Of one accelerator.

    Args:
        precision: of the layers' products, "bf16", "fp16", "fp8" or "fp4"; attention
            and the head stay in 16 bits.
        attention: "flash" (of the device's own generation: FlashAttention 2 on A100, 3
            or cuDNN later), "older flash" (of the one before) or "unfused".
    """

    def __init__(
        self,
        device: Accelerator,
        constants: TimeConstants,
        precision: str = "bf16",
        attention: str = "flash",
    ):
        require_one_of("attention", attention, ATTENTION)
        self.device, self.constants, self.attention = device, constants, attention
        peak, best = device.peak(precision), device.matmul_efficiency or MATMUL
        shares = {"fp8": constants.products_fp8, "fp4": constants.products_fp4}
        self.half_rate = device.flops * best * constants.products
        self.rate, self.thin = self.half_rate, constants.thin
        if precision in shares:
            self.rate = peak * best * shares[precision]
            self.thin += constants.casts
        self.flash_rate = device.flops * constants.flash
        self.softmax = constants.softmax
        if attention == "older flash":
            self.softmax = constants.older_softmax
        self.bus = device.memory_bandwidth

    def product(
        self, rows: float, inner: float, outer: float, half: bool = False
    ) -> float:
        """Of [rows, inner] x [inner, outer]; `half` for products that stay 16-bit."""
        touched = HALF * (rows * inner + inner * outer + rows * outer)
        rate, thin = self.rate, self.thin
        if half:
            rate, thin = self.half_rate, self.constants.thin
        if inner % ALIGNED or outer % ALIGNED:
            rate *= self.constants.unaligned
        lost = thin * touched / self.bus
        return 2 * rows * inner * outer / rate + lost

    def products(self, rows: float, matrices: Iterable[tuple[float, float]]) -> float:
        """Of rows through these matrices, (inner, outer) each."""
        return sum(self.product(rows, inner, outer) for inner, outer in matrices)

    def attend(
        self, flops: float, exponentials: float, head: int, backward: bool = False
    ) -> float:
        """Scores and values: `flops` of a forward of those pairs that a mask leaves,
        in heads of that size.

        Backward of a fused kernel computes the scores again: five products for two.
        """
        if self.attention == "unfused":  # all pairs, which are twice those of the mask
            passes = self.constants.scores * HALF * 2 * exponentials / self.bus
            rate = self.half_rate
            if head % ALIGNED:
                rate *= self.constants.unaligned
            return (2 * flops / rate + passes) * (2 if backward else 1)
        seconds = flops / self.flash_rate
        if self.device.exponentials:
            slow = self.softmax * exponentials / self.device.exponentials
        else:
            slow = 0.0
        return seconds * (2.5 if backward else 1) + slow

    def passes(self, elements: float) -> float:
        """Elements of 16 bits, read or written."""
        return self.constants.element_wise * HALF * elements / self.bus

    def accumulation(self, weights: float) -> float:
        """Adding gradients of these weights to those of earlier micro-batches."""
        return self.constants.accumulate * 2 * FULL * weights / self.bus

    def host(self, kernels: float) -> float:
        """Of the host, which launches them one by one."""
        return kernels * self.constants.launch
