"""DDP's timeline: backward, and the buckets that leave while it runs."""

from typing import Any

from ... import runs, values
from ...figures import REGISTRY
from ...svg import TimeAxis, document, fit, line, text
from .drawing import WIDTH, Box, boxed

Event = list[Any]
LEFT, ROW = 62, 28


@REGISTRY
def ddp_overlap(layers: int = 8, width: int = 512, cap_mb: float = 2.0) -> str:
    """Backward and its buckets by rank 0's clock."""
    from .runs import backward_by_the_clock

    return overlap_chart(
        runs.remembered(backward_by_the_clock, 2, layers, width, cap_mb)[0]
    )


def overlap_chart(events: list[Event]) -> str:
    """Events of `backward_by_the_clock`: a row for backward, and one a bucket."""
    at = {
        kind: {n: time for what, n, time in events if what == kind}
        for kind in ("gradient", "ready", "sent", "done")
    }
    (end,) = (time for what, _, time in events if what == "end")
    last = max(end, *at["done"].values())
    computing = max(at["gradient"].values())

    axis = TimeAxis(last, LEFT, WIDTH)
    px = axis.at
    parts = [text(2, 21, "backward", "xt-tick")]
    begun = 0.0
    for number, time in at["gradient"].items():
        hover = f"gradient of layer {number} complete at {values.seconds(time)}"
        wide = max(px(time) - px(begun) - 1.5, 1.5)
        words = str(number) if wide > 10 else ""
        parts += boxed(Box(words, 0, hover), px(begun), 4, wide, ROW - 4)
        begun = time
    for row, bucket in enumerate(sorted(at["sent"]), start=1):
        parts += bucket_row(bucket, [at[k][bucket] for k in ("ready", "sent", "done")],
                            4 + row * ROW, px)  # fmt: skip
    bottom = 4 + ROW * (len(at["sent"]) + 1)
    parts.append(line(px(computing), 2, px(computing), bottom, "xt-mark"))
    parts.append(line(px(end), 2, px(end), bottom, "xt-axis"))
    parts += [axis.base(bottom + 2), *axis.ends(bottom + 18)]
    early = sum(time < computing for time in at["sent"].values())
    words = (
        f"{early} of {len(at['sent'])} buckets leave before the last gradient, which "
        f"is complete at {values.seconds(computing)}; the last bucket is done at "
        f"{values.seconds(max(at['done'].values()))}, backward returns at "
        f"{values.seconds(end)}"
    )
    drawing = document(
        WIDTH, bottom + 26, parts, "Backward and its all-reduces over time", words
    )
    return fit(drawing, WIDTH)


def bucket_row(bucket: int, times: list[float], y: float, px: Any) -> list[str]:
    """A bucket's gradients complete (a dot), then its all-reduce from call to end."""
    ready, sent, done = times
    hover = (
        f"bucket {bucket}: gradients complete at {values.seconds(ready)}, all-reduce "
        f"from {values.seconds(sent)} to {values.seconds(done)}"
    )
    colour = 1 + bucket % 6
    wide = max(px(done) - px(sent), 1.5)
    return [
        text(2, y + 17, f"bucket {bucket}", "xt-tick"),
        *boxed(Box("", colour, hover), px(sent), y, wide, ROW - 4),
        f'<circle cx="{px(ready):.1f}" cy="{y + ROW / 2 - 2:.1f}" r="4" '
        f'class="xt-dot xt-s{colour}"><title>gradients complete</title></circle>',
    ]
