"""The appendix on sources that differ: what only its tables compute."""

from xtrain.plan import Layout, activation_memory, memory_per_device, pipeline_idle
from xtrain.schedules import SCHEDULES, simulate

from ...values import value
from .common import gpt_shape


@value
def korthikanti_extra_share() -> float:
    """What the head and the last norm of the 22B model keep, over its layers."""
    layout = Layout(tensor=8, sequence_parallel=True, micro_batch=4)
    held = memory_per_device(gpt_shape(6144, 64, 48), layout, 2048, formula="unfused",
                             logit_bytes=4)  # fmt: skip
    layers = 48 * activation_memory(2048, 4, 6144, 64, 8, True)
    return (held.activations - layers + held.logits) / layers


@value
def dualpipe_idle(played: bool, *times: float) -> float:
    """Idle time of DualPipe on 8 ranks: the report's form, or what is played."""
    forward, whole, weight, overlapped = times
    each = forward, whole - weight, weight
    if not played:
        return pipeline_idle("dualpipe", 8, *each, overlapped=overlapped)
    schedule = SCHEDULES["dualpipe"](8, 20)
    return max(simulate(schedule, *each, overlapped=overlapped).idle)
