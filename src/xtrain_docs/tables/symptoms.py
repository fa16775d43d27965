"""The bug gallery by symptom: what you see leads to the mistake that shows so.

The texts are those of the tables on the gallery's pages; here stands only which bug
belongs to which symptom.
"""

import re
from functools import cache
from typing import NamedTuple

from .. import config
from . import REGISTRY, Table

ROW = re.compile(r"^\| \[(.+?)\]\(#(\S+?)\) \| (.+) \| (.+) \|$")
GROUPS = {
    "hangs": "lc1#b01 lc1#b08 lc2#runs-out lc5#b42-send-first lc5#fewer lc7#detached",
    "slow": "lc1#b02 lc2#no-sync-backward",
    "memory": "lc2#kept-apart lc3#b19 lc3#zero-over-ddp lc5#b38 lc5#view lc6#b55",
    "nan": "lc3#b18 lc4#b28 lc6#b35 lc6#masked-row",
    "loss": (
        "lc2#b12 lc2#b51 lc2#padding lc3#b22 lc3#sums-in-bf16 lc4#gathered-logits "
        "lc4#fan-in lc5#b37 lc5#norm lc6#b34 lc6#labels lc6#angles lc6#loss-scale "
        "lc7#b48 lc7#discarded-loss lc7#aux-scale lc7#b49 lc7#clip-norm "
        "lc8#batch-by-rank lc8#clip-early lc8#data-from-0 lc8#rate-from-0"
    ),
    "still": "lc2#b09 lc3#b15 lc3#b16 lc3#b20 lc3#stale lc4#b23",
    "drift": (
        "lc2#b10 lc2#b13 lc2#parameter-hook lc2#only-if-dp lc3#skips-alone lc3#b21 "
        "lc4#norm-slice lc4#b26 lc4#identical-shards lc5#b41 lc5#hooks "
        "lc7#router-partial lc8#without-context"
    ),
    "gradients": (
        "lc2#b11 lc2#b14 lc2#early-hook lc2#unused lc2#tied lc3#b17 "
        "lc3#shards-before-tying lc4#b24 lc4#counted-twice lc4#in-place lc4#contiguous "
        "lc4#b25 lc5#b39 lc5#b43 lc5#store lc6#b30 lc6#b32 lc6#b33 lc6#stale-keys "
        "lc6#dtypes lc6#fixed-dtype lc7#b44 lc7#b45 lc7#b47 lc7#gathered-input "
        "lc8#all-ranks lc8#experts-summed"
    ),
    "values": (
        "lc1#b03 lc1#b04 lc1#b05 lc1#b06 lc1#b07 lc1#b52 lc1#b53 lc1#b54 lc4#b29 "
        "lc4#b27 lc4#float-alias lc4#counted-by-name lc5#b36 lc5#b40 lc5#b42 "
        "lc5#next-is-previous lc5#first-letter lc5#sizes lc6#b31 lc7#b46 lc7#b50 "
        "lc7#random-drop lc7#size-check lc3#muon-on-shards "
        "lc8#order-by-rank lc8#only-rank-0 lc8#mesh-order"
    ),
}
"""Bugs, as page#anchor, by symptom; each bug stands under one."""


class Bug(NamedTuple):
    """A row of a table of the gallery."""

    name: str
    seen: str
    shown_by: str


@cache
def bugs() -> dict[str, Bug]:
    """All of the gallery, by page#anchor."""
    found = {}
    for page in sorted((config.PAGES / "bugs").glob("*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if row := ROW.match(line):
                name, anchor, seen, shown_by = row.groups()
                found[f"{page.stem}#{anchor}"] = Bug(name, seen, shown_by)
    return found


@REGISTRY
def bugs_by_symptom(symptom: str) -> Table:
    """What you see, the mistake behind it, and what shows it for sure."""
    if symptom not in GROUPS:
        raise ValueError(f"symptom={symptom!r} is none of {', '.join(GROUPS)}")
    rows = []
    for place in GROUPS[symptom].split():
        page, _, anchor = place.partition("#")
        name, seen, shown_by = bugs()[place]
        rows.append((seen, f"[{name}](bugs/{page}.md#{anchor})", shown_by))
    return Table(("what you see", "the mistake and its cure", "a sure sign"), rows)
