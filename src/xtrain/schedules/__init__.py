"""lc5: pipeline schedules as data: made, checked, played with given times, drawn.

Standard library only, so the same code runs in a browser's Python.
"""

from xtrain.schedules.action import Action, Schedule, parse_action, parse_actions
from xtrain.schedules.chimera import chimera
from xtrain.schedules.draw import render_svg, render_text
from xtrain.schedules.dualpipe import dualpipe, dualpipe_simple, dualpipe_v
from xtrain.schedules.gpipe import gpipe
from xtrain.schedules.interleaved import interleaved
from xtrain.schedules.one_f_one_b import one_f_one_b
from xtrain.schedules.passes import forward_only, with_messages, with_reductions
from xtrain.schedules.simulate import Timeline, simulate
from xtrain.schedules.validate import validate
from xtrain.schedules.zero_bubble import zb_h1, zb_h2, zb_v

SCHEDULES = {
    made.__name__: made
    for made in (
        gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v,
        chimera, dualpipe_simple, dualpipe, dualpipe_v,
    )
}  # fmt: skip
"""Every schedule by its name."""

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "Timeline",
    "chimera",
    "dualpipe",
    "dualpipe_simple",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "parse_action",
    "parse_actions",
    "render_svg",
    "render_text",
    "simulate",
    "validate",
    "with_messages",
    "with_reductions",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
