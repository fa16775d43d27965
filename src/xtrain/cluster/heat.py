"""Which links of a topology a run used most, as a picture.

    gpu    0  1  2  3 ...      the links of one kind in a row, a cell each; or, where
    up     #  #  .  .          every pair of ranks has a link, sources down and
    down   .  #  #  .          targets across

A cell is the darker, the larger the share of the run for which the link's bytes need
its whole bandwidth. The name, the bytes and the time with something in flight are the
text for the pointer.
"""

import html
import re
from collections.abc import Iterator

from xtrain.cluster.amounts import in_words
from xtrain.cluster.draw import document
from xtrain.cluster.recorder import LinkUse, RunRecord

PAIR = re.compile(r"(\d+) to (\d+)")
NAME = re.compile(r"(\D+) (\d+) (.+)")
LEFT, TOP, LARGEST, PER_ROW = 52.0, 26.0, 18.0, 32
Cell = tuple[float, float, str]  # column, row, link


def load(use: LinkUse, seconds: float) -> float:
    """The share of a run for which a link's bytes need its whole bandwidth."""
    return use.bytes / use.bandwidth / seconds if seconds else 0.0


def busiest(record: RunRecord, most: int = 5) -> list[tuple[str, LinkUse, float]]:
    """The links with the highest load: name, use, load."""
    loads = [(n, use, load(use, record.makespan)) for n, use in record.links.items()]
    return sorted(loads, key=lambda one: -one[2])[:most]


def heat_svg(
    record: RunRecord, title: str = "Load of the links", width: int = 400
) -> str:
    """A cell for each link that something crossed.

    Raises:
        ValueError: nothing crossed a link: the cluster had no topology, or one rank.
    """
    if not record.links:
        raise ValueError(
            "heat_svg: no link was crossed; does the cluster have a topology?"
        )
    most = busiest(record, 1)[0]
    pairs = all(PAIR.fullmatch(name) for name in record.links)
    cells, names = matrix(record) if pairs else by_kind(record)
    across = 1 + max(column for column, *_ in cells)
    left = max(LEFT, 8 + 6.2 * max(len(text) for _, text in names))
    size = min((width - left) / across, LARGEST)
    down = 1 + max(row for _, row, _ in cells)
    high = min(size, LARGEST) if pairs else LARGEST
    parts = list(scale_of(most[2]))
    for row, text in names:
        y = TOP + row * high + 0.5 * high + 4
        parts.append(f'<text class="t" x="0" y="{y:.1f}">{html.escape(text)}</text>')
    for column, row, link in cells:
        use = record.links[link]
        share = load(use, record.makespan)
        parts.append(
            f'<rect class="h" x="{left + column * size:.2f}" '
            f'y="{TOP + row * high:.2f}" width="{0.9 * size:.2f}" '
            f'height="{0.9 * high:.2f}" '
            f'fill-opacity="{0.06 + 0.94 * share / (most[2] or 1):.2f}">'
            f"<title>{html.escape(describe(link, use, share))}</title></rect>"
        )
    words = f"{title}: the busiest of {len(record.links)}, {most[0]}, has "
    return document(width, TOP + down * high + 4, parts, words + percent(most[2]))


def describe(link: str, use: LinkUse, share: float) -> str:
    busy = in_words(use.busy, "s")
    return f"{link}: {in_words(use.bytes, 'B')}, load {percent(share)}, busy for {busy}"


def percent(share: float) -> str:
    digits = f"{100 * share:.2g}" if share < 0.095 else f"{100 * share:.0f}"
    return f"{digits} %"


def scale_of(most: float) -> Iterator[str]:
    """What the colours mean."""
    for step in range(5):
        yield (
            f'<rect class="h" x="{LEFT + 14 * step:.0f}" y="4" width="14" height="10" '
            f'fill-opacity="{0.06 + 0.94 * step / 4:.2f}"/>'
        )
    yield f'<text class="t" x="{LEFT - 6}" y="13" text-anchor="end">load 0</text>'
    yield f'<text class="t" x="{LEFT + 76}" y="13">{percent(most)} of the run</text>'


def matrix(record: RunRecord) -> tuple[list[Cell], list[tuple[float, str]]]:
    """Links of pairs: sources down, targets across."""
    ends = {link: tuple(map(int, link.split(" to "))) for link in record.links}
    size = 1 + max(max(pair) for pair in ends.values())
    every = max(1, -(-size // 12))
    names = [(float(row), f"from {row}") for row in range(0, size, every)]
    return [(float(t), float(s), link) for link, (s, t) in ends.items()], names


def by_kind(record: RunRecord) -> tuple[list[Cell], list[tuple[float, str]]]:
    """Links named "gpu 3 up": those of one kind side by side, by number."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for link in record.links:
        found = NAME.fullmatch(link)
        what, number, which = found.groups() if found else ("", len(kinds), link)
        kinds.setdefault((what, which), {})[int(number)] = link
    cells: list[Cell] = []
    names, row = [], 0.0
    for (what, which), links in kinds.items():
        for first in range(0, 1 + max(links), PER_ROW):
            here = {n: link for n, link in links.items() if 0 <= n - first < PER_ROW}
            if not here:
                continue
            names.append((row, f"{what} {first}+" if first else f"{what} {which}"))
            cells += [(float(n - first), row, link) for n, link in here.items()]
            row += 1
        row += 0.3
    return cells, names
