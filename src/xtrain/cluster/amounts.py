"""Seconds and bytes in words, for drawings and the command line."""

STEPS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
}


def in_words(amount: float, unit: str) -> str:
    """4.2e-3 of "s" as "4.2 ms", 3e9 of "B" as "3 GB"."""
    steps = STEPS[unit]
    size, name = next((step for step in steps if abs(amount) >= step[0]), steps[-1])
    if not amount:
        return f"0 {unit}"
    digits = f"{amount / size:.3g}"
    return f"{float(digits):.0f} {name}" if "e" in digits else f"{digits} {name}"
