"""Drawings as inline SVG text that follows the theme.

    shapes     text, lines and boxes, and the document that holds them
    keys       what the colours mean, above a drawing
    axes       Axis: scales and ticks
    lines      line_chart
    bars       bar_chart
    stacked    bars of several parts
    timeline   TimeAxis: what happened when

Colours are CSS classes (`xt-s0` .. `xt-s7` for series), so light and dark need one
drawing. Every drawing has a title and a description for readers who do not see it.
"""

from .axes import Axis
from .bars import bar_chart, beside
from .keys import rank_key, swatches
from .lines import Frame, line_chart
from .shapes import cell, document, line, rect, text
from .stacked import stacked
from .timeline import TimeAxis

__all__ = [
    "Axis",
    "Frame",
    "TimeAxis",
    "bar_chart",
    "beside",
    "cell",
    "document",
    "line",
    "line_chart",
    "rank_key",
    "rect",
    "stacked",
    "swatches",
    "text",
]
