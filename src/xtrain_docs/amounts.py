"""Amounts as text: bytes, seconds, shares; what pages write behind `|` as filters."""

import re
from collections.abc import Callable

KiB, MiB, GiB = 2**10, 2**20, 2**30
NO_BREAK = "\u00a0"
UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B(?:/s)?|bytes|ns|us|ms|s|%)(?![\w/]))")
"""The space between a number and its unit."""
FILTERS: dict[str, Callable[..., str]] = {}


def text_filter(function: Callable[..., str]) -> Callable[..., str]:
    """Register a filter: a number in, the text on the page out."""
    FILTERS[function.__name__.rstrip("_")] = function
    return function


def digits(number: float, significant: int = 3) -> str:
    """A number to some significant digits, without an exponent or a dot at the end."""
    text = f"{number:.{significant}g}"
    if "e" in text:
        text = f"{float(text):.0f}"
    return text


@text_filter
def bytes_(number: float, significant: int = 3) -> str:
    """1572864 as `1.5 MiB`: binary units, which is what buffers are made of."""
    for unit, name in ((2**40, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(number) >= unit:
            return f"{digits(number / unit, significant)} {name}"
    return f"{digits(number, significant)} bytes"


@text_filter
def si(number: float, unit: str = "", significant: int = 3) -> str:
    """6.24e10 as `62.4 G`, with a unit if one is given (`B/s`)."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{digits(number / size, significant)} {name}{unit}"
    return f"{digits(number, significant)} {unit}".rstrip()


@text_filter
def percent(number: float, places: int = 0) -> str:
    """0.755 as `76 %`."""
    return f"{number * 100:.{places}f} %"


@text_filter
def times(number: float, significant: int = 3) -> str:
    """1.75 as `1.75x`; a ratio of several machines as `1.75x to 2.1x`."""
    ends = (getattr(number, "low", number), getattr(number, "high", number))
    low, high = (f"{digits(end, significant)}x" for end in ends)
    return low if low == high else f"{low} to {high}"


@text_filter
def seconds(number: float, significant: int = 3) -> str:
    """0.0042 as `4.2 ms`."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(number) >= size:
            return f"{digits(number / size, significant)} {name}"
    return f"{digits(number / 1e-9, significant)} ns" if number else "0 s"


@text_filter
def number(count: float, significant: int = 3) -> str:
    """A plain number; whole numbers keep all digits, in groups of three."""
    if float(count).is_integer():
        whole = int(count)
        return f"{whole:,}".replace(",", " ") if abs(whole) > 9999 else str(whole)
    return digits(count, significant)


@text_filter
def rounded(amount: float, significant: int = 3) -> str:
    """4397.3 as `4400`."""
    return number(float(f"{amount:.{significant}g}"))


@text_filter
def gib(size: float) -> str:
    """Bytes in GiB, two digits behind the dot; nothing is a dash."""
    return f"{size / GiB:.2f}" if size else "–"


def count(amount: float) -> str:
    """73728 as `73 728`."""
    return f"{int(amount):,}".replace(",", NO_BREAK)
