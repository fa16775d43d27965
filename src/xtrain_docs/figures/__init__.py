"""Figures that pages show: functions registered here return inline SVG text.

    @REGISTRY
    def my_figure(ranks: int = 8) -> str: ...

A page then says ```` ```figure my_figure ranks=4 ````. Draw with `xtrain_docs.svg`,
whose charts follow the theme's colours.
"""

from ..blocks import Registry

REGISTRY = Registry("figure")
