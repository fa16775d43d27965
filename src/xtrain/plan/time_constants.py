"""The constants of the model of time: what no datasheet prints, fitted on runs.

Each is one number for all accelerators, models and frameworks. `xtrain.plan.fit` finds
them on two thirds of the published runs of `docs/data/runs/runs.csv` and prints them;
the page "How far off is it?" compares what they give with the other third.
"""

from typing import NamedTuple


class TimeConstants(NamedTuple):
    """Shares are of a printed rate; others are factors, or seconds where it is said."""

    products: float
    """Rate of large 16-bit products in training over the best that was measured alone
    (`Accelerator.matmul`, `MATMUL` of the peak where none is known)."""
    thin: float
    """How often a product's operands and result cross the memory bus: what products
    of few rows or columns lose."""
    unaligned: float
    """Rate of products with a size that 8 does not divide, over that of others."""
    products_fp8: float
    """As `products`, of the fp8 peak."""
    products_fp4: float
    """As `products`, of the fp4 peak."""
    casts: float
    """Bytes of casts to fp8 or fp4 over those of a product's operands and result."""
    grouped: float
    """Rate of the experts' products over that of one product of the same size."""
    flash: float
    """Share of the peak that the products of fused attention reach."""
    softmax: float
    """Time of all its other work over that of one exponential for each pair."""
    older_softmax: float
    """The same of a kernel that was written for the device's predecessor."""
    scores: float
    """How often unfused attention reads or writes its scores in a forward."""
    element_wise: float
    """Bytes of norms, additions and activations over those of one pass each."""
    permutation: float
    """Bytes of permuting tokens for their experts over those of one pass each."""
    imbalance: float
    """Copies on the busiest expert rank over the average."""
    launch: float
    """Seconds of the host for one kernel."""
    inside: float
    """Share of a node's link that collectives reach."""
    between: float
    """Share of the network that they reach."""
    expert_waits: float
    """Share of an all-to-all that is not hidden; `dualpipe` hides what it can."""
    buckets_hidden: float
    """Share of the last backward beside which DDP sends gradients."""
    last_hidden: float
    """The same of stages 1 and 2."""
    gather_hidden: float
    """Share of the first forward beside which stages 1 and 2 gather weights."""
    interference: float
    """Seconds that compute loses for a second of a collective behind it."""
    step: float
    """Seconds a step for each doubling of the devices: norms, logs, barriers."""
    stragglers: float
    """Growth of a step for each doubling of the devices."""
    messages: float
    """Messages between stages over their closed form."""


FITTED = TimeConstants(
    products=0.85, thin=1.19, unaligned=0.0371, products_fp8=1, products_fp4=1,
    casts=0.973, grouped=0.678, flash=0.545, softmax=0.807, older_softmax=6.38,
    scores=4.46, element_wise=0.847, permutation=0.7, imbalance=1.1, launch=1.63e-05,
    inside=0.597, between=0.95, expert_waits=0.356, buckets_hidden=0.214,
    last_hidden=0.276, gather_hidden=0.116, interference=0.0652, step=0.0162,
    stragglers=0.00789, messages=4,
)  # fmt: skip
EXACT = TimeConstants(
    products=1, thin=0, unaligned=1, products_fp8=1, products_fp4=1, casts=0,
    grouped=1, flash=1, softmax=0, older_softmax=0, scores=0, element_wise=0,
    permutation=0, imbalance=1, launch=0, inside=1, between=1,
    expert_waits=1, buckets_hidden=1,
    last_hidden=1, gather_hidden=1, interference=0, step=0, stragglers=0, messages=1,
)  # fmt: skip
"""A machine without losses: products at the best measured rate, links at their own."""
MATMUL = 0.8
"""Best measured products over the peak, of devices without a figure: as H100's."""
RANGES = {"dense": (0.83, 1.23), "experts": (0.84, 1.31)}
"""Measured over estimated tokens a second, from the 10th to the 90th percentile of the
runs that were not fitted: what an estimate says of its own error."""
