"""Text colours have a contrast of at least 4.5 to 1 on the grounds they stand on."""

import re
from pathlib import Path

import pytest

import xtrain_docs

CSS = Path(xtrain_docs.__file__).with_name("theme") / "assets/xtrain.css"
TEXT = ("ink", "soft", "faint", "link", "accent")
GROUNDS = ("paper", "card", "sunk")
PAIRS = [
    *((text, ground) for text in TEXT for ground in GROUNDS),
    ("good", "good-ground"), ("soft", "good-ground"), ("bad", "bad-ground"),
    ("ink", "bad-ground"), ("soft", "bad-ground"),
    ("accent", "accent-ground"), ("ink", "mark"), ("soft", "mark"), ("faint", "mark"),
    ("link", "good-ground"), ("paper", "accent"), ("paper", "ink"), ("paper", "link"),
    *((f"r{i}", "card") for i in range(8)),
    *((f"code-{c}", ground) for c in "kfsnco" for ground in ("card", "sunk", "mark")),
]  # fmt: skip


def palette(scheme: str) -> dict[str, str]:
    """The --xt- colours of a scheme."""
    block = re.search(
        rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)\n}}', CSS.read_text(), re.S
    )[1]
    return dict(re.findall(r"--xt-([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_standard_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_contrast(scheme, text, ground):
    colours = palette(scheme)
    assert contrast(colours[text], colours[ground]) >= 4.5
