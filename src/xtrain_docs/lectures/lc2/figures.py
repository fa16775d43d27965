"""Figures of the lc2 pages, drawn from real runs."""

from typing import Any

from ... import runs, values
from ...figures import REGISTRY
from ...svg import document, fit, line, text

Event = list[Any]
LEFT, WIDTH, ROW = 86, 560, 26


def bar(
    x: float, y: float, width: float, colour: int, words: str, hover: str
) -> list[str]:
    """A box with a word in it, if there is room."""
    box = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" '
        f'height="{ROW - 6}" rx="4" class="xt-bar-fill xt-s{colour}" '
        f'fill-opacity="0.4"><title>{hover}</title></rect>'
    )
    if width < 8 * len(words):
        return [box]
    return [box, text(x + width / 2, y + 14.5, words, "xt-tick", "middle")]


@REGISTRY
def ddp_overlap(layers: int = 8, width: int = 512, cap_mb: float = 2.0) -> str:
    """Backward, and the buckets that leave while it runs, by rank 0's clock."""
    from .runs import backward_by_the_clock

    return overlap_chart(
        runs.remembered(backward_by_the_clock, 2, layers, width, cap_mb)[0]
    )


def overlap_chart(events: list[Event]) -> str:
    """Events of `backward_by_the_clock`: a row for backward, and one a bucket."""
    gradients = [(n, at) for what, n, at in events if what == "gradient"]
    sent = {n: at for what, n, at in events if what == "sent"}
    done = {n: at for what, n, at in events if what == "done"}
    (end,) = (at for what, _, at in events if what == "end")
    last = max(end, *done.values())
    computing = max(at for _, at in gradients)

    def px(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * at / last

    parts = [text(LEFT - 8, 18.5, "backward", "xt-tick", "end")]
    begun = 0.0
    for number, at in gradients:
        hover = f"gradient of layer {number} complete at {values.seconds(at)}"
        parts += bar(px(begun), 4, px(at) - px(begun) - 1.5, 0, str(number), hover)
        begun = at
    for row, bucket in enumerate(sorted(sent), start=1):
        start, stop = sent[bucket], done[bucket]
        hover = f"bucket {bucket}: {values.seconds(start)} to {values.seconds(stop)}"
        y = 4 + row * ROW
        parts.append(text(LEFT - 8, y + 14.5, f"bucket {bucket}", "xt-tick", "end"))
        parts += bar(px(start), y, px(stop) - px(start), 1 + bucket % 6, "", hover)
    bottom = 4 + ROW * (len(sent) + 1)
    parts.append(line(px(computing), 2, px(computing), bottom, "xt-mark"))
    parts.append(line(LEFT, bottom + 2, WIDTH - 10, bottom + 2, "xt-axis"))
    parts.append(text(LEFT, bottom + 18, "0 ms", "xt-tick"))
    parts.append(text(WIDTH - 10, bottom + 18, values.seconds(last), "xt-tick", "end"))
    early = sum(at < computing for at in sent.values())
    words = (
        f"{early} of {len(sent)} buckets leave before the last gradient, which is "
        f"complete at {values.seconds(computing)}; the last bucket is done at "
        f"{values.seconds(max(done.values()))}"
    )
    drawing = document(
        WIDTH, bottom + 26, parts, "Backward and its all-reduces over time", words
    )
    return fit(drawing, WIDTH)
