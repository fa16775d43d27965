"""How long a pipeline's ranks wait, and what they hold, by the papers' closed forms.

p ranks, m micro-batches, v chunks a rank; F, B and W are the times of one virtual
stage: forward, gradient of the input, gradients of the weights (the DualPipe report
writes B for both together).

    gpipe, one_f_one_b   (p - 1)(F + B + W)
    interleaved          (p - 1)(F + B + W)              of chunks, so 1/v of a rank's
    zb_h1                (p - 1)(F + B - W)
    zb_h2                (p - 1)(F + B - 2W)
    zb_v                 0                               if F = B = W
    chimera              (p - 2)(B + W)                  m = p, if B + W >= F
    dualpipe             (p/2 - 1)(F&B + B - 2W)         if F = B = W
    dualpipe_v           (p - 1)(F&B + B - 2W)           if F = B = W; p ranks hold 2p

They hold for enough micro-batches: `xtrain.schedules.simulate` plays any number.
Interleaved 1F1B is exact for every m: with m < p its chunks wait for the loop, too,
(p - m)(v - 1)(F + B + W).

Sources: Huang et al., 2019; Narayanan et al., 2021; Qi et al., 2024 (tables 1 and 2);
Li and Hoefler, 2021; DeepSeek-AI, 2024 (table 2).
"""

from xtrain.plan.checks import require_one_of


def pipeline_idle(
    schedule: str,
    ranks: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    overlapped: float | None = None,
    micro_batches: int | None = None,
    chunks: int = 1,
) -> float:
    """The idle time of the rank that waits longest in a step.

    Args:
        schedule: a name of `xtrain.schedules`.
        overlapped: F&B of DualPipe; by default F + B + W.
        micro_batches: None for as many as the form needs.
        chunks: virtual stages a rank, of `interleaved`.

    Raises:
        ValueError: no form is known for this schedule.
    """
    f, b, w = forward, backward_input, backward_weight
    pair = f + b + w if overlapped is None else overlapped
    too_few = max(ranks - (micro_batches or ranks), 0) * (chunks - 1)
    forms = {
        "gpipe": (ranks - 1) * (f + b + w),
        "one_f_one_b": (ranks - 1) * (f + b + w),
        "interleaved": (ranks - 1 + too_few) * (f + b + w),
        "zb_h1": (ranks - 1) * (f + b - w),
        "zb_h2": (ranks - 1) * (f + b - 2 * w),
        "zb_v": 0.0,
        "chimera": (ranks - 2) * (b + w),
        "dualpipe": (ranks / 2 - 1) * (pair + b - 2 * w),
        "dualpipe_v": (ranks - 1) * (pair + b - 2 * w),
    }
    require_one_of("schedule", schedule, forms)
    return forms[schedule]


def pipeline_delay(
    schedule: str, ranks: int, micro_batches: int, p2p: float, chunks: int = 1
) -> float:
    """What messages of `p2p` seconds between stages add to a step.

    The first three forms agree with the simulation on the published settings of Qi et
    al. (p = 8, 16, 32); of other schedules only the messages are counted that a step
    waits for while it fills and drains.
    """
    p, m = ranks, micro_batches
    if p == 1:
        return 0.0
    forms = {
        "one_f_one_b": 2 * (p - 1) * m / p + 2 * (p - 2),
        "zb_h1": 4 * (p - 1),
        "zb_h2": 2 * (p - 1),
    }
    return p2p * forms.get(schedule, 2 * (p - 1) * chunks)


def pipeline_activations(
    schedule: str, ranks: int, micro_batches: int, chunks: int = 1
) -> float:
    """Micro-batches whose activations the fullest rank holds, m being large enough.

    A virtual stage's micro-batch counts 1 / chunks.
    """
    p, m = ranks, micro_batches
    forms = {
        "gpipe": m,
        "one_f_one_b": min(m, p),
        "interleaved": interleaved_activations(p, m, chunks),
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_v": p,
        "chimera": p,
        "dualpipe": p + 1,
        "dualpipe_v": (2 * p + 1) / 2,
    }
    require_one_of("schedule", schedule, forms)
    return float(forms[schedule])


def interleaved_activations(
    ranks: int, micro_batches: int, chunks: int, rank: int = 0
) -> float:
    """Micro-batches that a rank of interleaved 1F1B holds: its warm-up, and one.

    With m a multiple of p, rank 0 of several chunks holds p (1 + (p - 1) / (p v)).
    """
    first_round = -(-micro_batches // max(micro_batches // ranks, 1))
    twice = 2 if chunks > 1 else 1
    ahead = twice * (ranks - 1 - rank) + (chunks - 1) * first_round
    return min(micro_batches, (ahead + 1) / chunks)


def bubble_over_ideal(
    schedule: str,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float:
    """Idle time over the time without a bubble: (p - 1) / m of GPipe and 1F1B.

    A step takes (1 + this) times the ideal one. Times are those of a virtual stage.
    """
    times = forward, backward_input, backward_weight
    work = micro_batches * chunks * sum(times)
    sizes = {"micro_batches": micro_batches, "chunks": chunks}
    return pipeline_idle(schedule, ranks, *times, **sizes) / work


def idle_fraction(
    schedule: str, ranks: int, micro_batches: int, chunks: int = 1, **times: float
) -> float:
    """Idle time over the time of the whole step: (p - 1) / (m + p - 1) of the same."""
    over = bubble_over_ideal(schedule, ranks, micro_batches, chunks, **times)
    return over / (1 + over)
