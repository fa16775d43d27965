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
    call: float
    """Seconds that a call across nodes takes beyond its hops and bytes."""
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
    accumulate: float
    """Bytes of adding a micro-batch's gradients to those before it, over one fp32 read
    and write."""
    pieces: float
    """Share of tensor ranks' collectives that hides, where they are sent in pieces."""


FITTED = TimeConstants(
    products=0.824, thin=0.534, unaligned=0.0356, products_fp8=1,
    products_fp4=0.673, casts=1.26, grouped=0.785, flash=0.643, softmax=2.08,
    older_softmax=11.7, scores=4.62, element_wise=0.986, permutation=1.42,
    imbalance=1, launch=1.97e-05, inside=0.693, between=0.95, call=0.000344,
    expert_waits=0.464, buckets_hidden=0.487, last_hidden=0.11,
    gather_hidden=0.02, interference=0.02, step=0.0138, stragglers=0.00116,
    messages=7.5, accumulate=0.67, pieces=0.898,
)  # fmt: skip
EXACT = TimeConstants(
    products=1, thin=0, unaligned=1, products_fp8=1, products_fp4=1, casts=0,
    grouped=1, flash=1, softmax=0, older_softmax=0, scores=0, element_wise=0,
    permutation=0, imbalance=1, launch=0, inside=1, between=1,
    expert_waits=1, buckets_hidden=1,
    last_hidden=1, gather_hidden=1, interference=0, step=0, stragglers=0, messages=1,
    accumulate=0, pieces=0, call=0,
)  # fmt: skip
"""A machine without losses: products at the best measured rate, links at their own."""
MATMUL = 0.8
"""Best measured products over the peak, of devices without a figure: as H100's."""
RANGES = {"dense": (0.85, 1.17), "experts": (0.78, 1.35)}
"""Measured over estimated tokens a second, from the 10th to the 90th percentile of the
runs that were not fitted: what an estimate says of its own error."""
