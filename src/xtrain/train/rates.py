"""Learning-rate schedules: a factor of the learning rate for each step.

    1        ----------- wsd: warm-up, stable, decay
            /  .        \\
           /     .       \\
          /  cosine .     \\
    min  /            . . .\\
        0   W          T - D   T    W warm-up steps, D steps of decay, T all steps

    warm-up   (s + 1) / (W + 1)                          step s, from 0
    cosine    m + (1 - m) (1 + cos(pi x)) / 2            m min_ratio, x share of D done
    linear    1 - (1 - m) x
    1-sqrt    1 - (1 - m) sqrt(x)

The factor is a function of the step and of T alone, so a run resumes with its step and
no state of a scheduler. A constant rate and wsd up to its decay do not use T: such a
run can be made longer. Where warm-up and decay meet, the lower one counts.

Sources: Loshchilov and Hutter, SGDR, 2017 (cosine); Hu et al., MiniCPM, 2024 (wsd);
Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations, 2024 (1-sqrt, and a decay of a fifth of all steps).
"""

import math
from dataclasses import dataclass
from typing import Literal

from xtrain.plan.checks import require_whole
from xtrain.train.values import check_types


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How the learning rate changes from step to step."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """What follows warm-up; wsd stays at the peak until its decay."""
    warmup: int = 0
    """Steps of linear warm-up."""
    decay: int | None = None
    """Steps of decay; unless given all after warm-up (cosine), or a fifth of all
    (wsd)."""
    shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """Of wsd's decay."""
    min_ratio: float = 0.1
    """The factor after decay."""

    def __post_init__(self) -> None:
        check_types(self)
        require_whole("warmup", self.warmup, least=0)
        if self.decay is not None:
            require_whole("decay", self.decay)
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio={self.min_ratio!r} is not between 0 and 1")


def rate_at(step: int, spec: Rate, total_steps: int) -> float:
    """The factor of the learning rate in step `step`, which counts from 0.

    After the last step it stays as it is at the end of decay.

    Raises:
        ValueError: step is below 0, or total_steps below 1.
    """
    require_whole("step", step, least=0)
    require_whole("total_steps", total_steps)
    warm = min((step + 1) / (spec.warmup + 1), 1.0)
    return min(warm, _decayed(step, spec, total_steps))


def _decayed(step: int, spec: Rate, total_steps: int) -> float:
    if spec.kind == "constant":
        return 1.0
    if spec.kind == "cosine":
        first = spec.warmup
        length = spec.decay or max(total_steps - first, 1)
    else:
        length = spec.decay or max(total_steps // 5, 1)
        first = total_steps - length
    done = min(max((step - first) / length, 0.0), 1.0)
    if spec.kind == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        left = 1 - (done if spec.shape == "linear" else math.sqrt(done))
    return spec.min_ratio + (1 - spec.min_ratio) * left
