"""Why the first layout beats the second, what limits it, and what would change it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from xtrain.plan.estimate import Assumptions, Estimate, Estimator
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.shapes import ModelShape

GIB = 2**30
WORDS = {
    "compute": "computing",
    "tensor": "collectives of tensor ranks",
    "context": "messages of context ranks",
    "expert": "all-to-alls of expert ranks",
    "bubble": "the pipeline's bubble",
    "pipeline": "messages between stages",
    "data": "gradients and weights that compute does not hide",
    "optimizer": "the optimizer",
    "step": "what every step takes",
    "stragglers": "stragglers",
}
LINKS = ("tensor", "context", "expert", "pipeline", "data")
CLOSE = 0.05
"""Estimates that differ by less are not told apart."""


def why_first(first: Estimate, second: Estimate) -> str:
    """A sentence: what the first saves against the second."""
    ratio = second.seconds / first.seconds
    gains = {name: second.parts[name] - first.parts[name] for name in first.parts}
    most = max(gains, key=lambda name: gains[name])
    least = min(gains, key=lambda name: gains[name])
    if ratio < 1:
        return (
            f"{second.layout} would take {first.seconds / second.seconds - 1:.1%} less "
            f"time than {first.layout}, but leaves less memory free than the reserve."
        )
    words = (
        f"{first.layout} beats {second.layout} by {ratio - 1:.1%}: it spends "
        f"{gains[most]:.2f} s less on {WORDS[most]}"
    )
    if gains[least] < -0.005:
        words += f", and {-gains[least]:.2f} s more on {WORDS[least]}"
    if ratio - 1 < CLOSE:
        words += f". Less than {CLOSE:.0%} apart, the estimate cannot tell them"
    return words + "."


def limits(one: Estimate, capacity: float, device: Accelerator) -> list[str]:
    """Sentences: memory, compute, and the link that takes most."""
    compute = one.parts["compute"] / one.seconds
    found = [
        f"Memory: {one.memory.total / GIB:.1f} of {capacity / GIB:.1f} GiB on the "
        f"{one.position} pipeline rank, most of it "
        f"{largest(one.memory.parts()).replace('_', ' ')}.",
        f"Compute takes {compute:.0%} of the step.",
    ]
    waits = {name: one.parts[name] for name in LINKS if one.parts[name] > 0}
    if waits:
        axis = largest(waits)
        where = link_of(one.layout, axis, device)
        share = waits[axis] / one.seconds
        found.append(
            f"Of all messages {WORDS[axis]} take most, {share:.1%} of the step, "
            f"{where}."
        )
    idle = one.parts["bubble"] / one.seconds
    if idle:
        found.append(f"The bubble takes {idle:.1%}.")
    return found


def largest(parts: dict[str, float]) -> str:
    """The name with most."""
    return max(parts, key=lambda name: parts[name])


def link_of(layout: Layout, axis: str, device: Accelerator) -> str:
    """Inside a node, or between nodes."""
    ranks = {"tensor": layout.tensor, "context": layout.tensor * layout.context}
    reach = ranks.get(axis, layout.gpus)
    if axis == "expert":
        inner = layout.expert_cut if layout.folded else layout.tensor * layout.context
        reach = inner * layout.expert
    inside = reach <= device.node
    return f"over {device.link.name} inside a node" if inside else "between nodes"


class Change(NamedTuple):
    """What one change makes of a layout."""

    what: str
    layout: Layout
    estimate: Estimate | None
    """None if it breaks a rule."""
    why: str


def what_if(
    shape: ModelShape,
    layout: Layout,
    accelerator: Accelerator | str,
    sequence: int,
    assumptions: Assumptions = Assumptions(),
) -> list[Change]:
    """Twice the devices, half the network, a longer sequence, other precision."""
    device = accelerator
    if isinstance(device, str):
        device = Accelerator.preset(device)
    adapter = assumptions.network
    if adapter is None and device.network is not None:
        adapter = device.network.bandwidth
    most = layout.micro_batches
    rows: list[tuple[str, Layout, int, Assumptions]] = [
        ("as it is", layout, sequence, assumptions),
        ("twice the devices, the same batch",
         replace(layout, data=2 * layout.data, micro_batches=most // 2 or 1),
         sequence, assumptions),
        ("twice the devices, twice the batch",
         replace(layout, data=2 * layout.data), sequence, assumptions),
    ]  # fmt: skip
    if adapter is not None:
        half = assumptions._replace(network=adapter / 2)
        rows.append(("half the network", layout, sequence, half))
    long = 16 * sequence
    spread = replace(
        layout, context=16 * layout.context, data=max(layout.data // 16, 1),
        shard_context=True,
    )  # fmt: skip
    if layout.data % 16 == 0:
        rows.append(
            (f"sequences of {long}, 16 context ranks", spread, long, assumptions)
        )
    if device.fp8 > 1:
        rows.append(
            ("fp8 products", layout, sequence, assumptions._replace(precision="fp8"))
        )
    return [_changed(shape, device, *row) for row in rows]


def _changed(
    shape: ModelShape,
    device: Accelerator,
    what: str,
    layout: Layout,
    sequence: int,
    assumed: Assumptions,
) -> Change:
    allowed = assumed.sharded_pipeline
    broken: Sequence[tuple[str, str]] = broken_rules(
        shape, layout, sequence, sharded_pipeline=allowed
    )
    if broken:
        return Change(what, layout, None, broken[0][1])
    found = Estimator(shape, device, sequence, assumed).estimate(layout)
    return Change(what, layout, found, "")
