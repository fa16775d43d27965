"""The tables and the memory bar of `xtrain plan`, in a terminal."""

import argparse
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from xtrain.plan.device_memory import DeviceMemory
from xtrain.plan.estimate import Assumptions, Estimate
from xtrain.plan.explain import limits, what_if, why_first
from xtrain.plan.hardware import Accelerator
from xtrain.plan.search import SearchResult
from xtrain.plan.shapes import ModelShape
from xtrain.plan.whole_run import WholeRun

GIB = 2**30
WIDTH = 88  # of what is not written to a terminal
COLOURS = ("blue", "cyan", "bright_cyan", "magenta", "bright_magenta", "green",
           "bright_green", "yellow", "red", "bright_red", "white")  # fmt: skip
LETTERS = "WGMOVALTBRU"  # one a part, so that the bar reads without colours


def show(
    shape: ModelShape,
    device: Accelerator,
    arguments: argparse.Namespace,
    batch: int,
    assumed: Assumptions,
    result: SearchResult,
    shown: list[Estimate],
    whole: WholeRun | None,
) -> None:
    """Everything, to the terminal or wherever standard output goes."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.begin_capture()  # rich itself would exit on a closed pipe
    capacity = assumed.capacity or device.memory
    tokens = batch * arguments.sequence
    console.print(
        f"[bold]{escape(arguments.model)}[/bold]  {shape.parameters / 1e9:.2f} B "
        f"parameters, {arguments.gpus} x {device.name} of {capacity / GIB:.1f} GiB\n"
        f"{batch} sequences of {arguments.sequence} tokens a step "
        f"({tokens / 1e6:.2f} M tokens); bytes by recipe {assumed.recipe}\n"
    )
    if shown:
        console.print(ranked(shown, arguments.gpus, capacity))
        best = shown[0]
        console.print(f"\nmemory of 1, {best.position} rank of the pipeline, GiB")
        console.print(memory_bar(best.memory, capacity, min(console.width, WIDTH)))
        console.print(memory_legend(best.memory, capacity, assumed.reserve))
        console.print(f"\nseconds of 1: {time_line(best)}")
        console.print(range_line(best, arguments.gpus))
        if whole is not None:
            console.print(whole_line(whole))
        console.print()
        if arguments.explain:
            for line in explained(shape, device, arguments, assumed, shown, capacity):
                console.print(line)
            console.print()
    else:
        console.print("no layout fits; why not:")
    console.print(failures(result))
    console.print(
        f"{result.tried} layouts tried, {result.estimated} estimated, "
        f"{len(result.found)} fit."
    )
    print(console.end_capture(), end="")


def ranked(shown: list[Estimate], gpus: int, capacity: float) -> Table:
    """The fastest layouts, one a line."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    columns = ("", "layout", "schedule", "recompute", "batch", "GiB", "", "s/step",
               "tok/s/GPU", "MFU", "causal")  # fmt: skip
    for name in columns:
        text = name in ("layout", "schedule", "recompute")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for place, one in enumerate(shown, start=1):
        layout = one.layout
        schedule = "1F1B" if layout.chunks == 1 else f"1F1B/{layout.chunks}"
        table.add_row(
            str(place),
            str(layout),
            schedule if layout.pipeline > 1 else "-",
            layout.recomputed,
            f"{layout.micro_batch}x{layout.micro_batches}",
            f"{one.memory.total / GIB:.1f}",
            gauge(one.memory.total / capacity),
            f"{one.seconds:.2f}",
            f"{one.tokens_per_second / gpus:.0f}",
            share(one.mfu),
            share(one.causal_mfu),
            style="yellow" if one.verdict == "tight" else "",
        )
    return table


def share(value: float) -> str:
    """In per cent; blank above 100, where all pairs are counted and half computed."""
    return f"{100 * value:.1f}%" if value <= 1 else ""


def range_line(one: Estimate, gpus: int) -> str:
    """What eight of ten published runs measured at such an estimate."""
    low, high = (rate / gpus for rate in one.range)
    return (
        f"tok/s/GPU of 1: eight of ten published runs with this estimate measured "
        f"{low:.0f} to {high:.0f}"
    )


def whole_line(run: WholeRun) -> str:
    """Days, dollars and failures of a whole run."""
    dollars = "" if run.dollars is None else f", {run.dollars:,.0f} dollars"
    return (
        f"{run.tokens / 1e9:,.0f} B tokens: {run.days:.1f} days{dollars}; "
        f"{run.failures:.1f} failures expected, a checkpoint every "
        f"{run.interval / 60:.0f} min, goodput {run.goodput:.1%}; Chinchilla: "
        f"{run.chinchilla / 1e9:,.0f} B tokens"
    )


def explained(
    shape: ModelShape,
    device: Accelerator,
    arguments: argparse.Namespace,
    assumed: Assumptions,
    shown: list[Estimate],
    capacity: float,
) -> Iterator[str | Table]:
    """Sentences, and a table of what would change."""
    first = shown[0]
    if len(shown) > 1:
        yield why_first(first, shown[1])
    yield from limits(first, capacity, device)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("what if")
    for name in ("s/step", "tok/s/GPU", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("memory")
    sequence = arguments.sequence
    for change in what_if(shape, first.layout, device, sequence, assumed):
        one = change.estimate
        if one is None:
            table.add_row(change.what, "", "", "", change.why)
            continue
        table.add_row(
            change.what,
            f"{one.seconds:.2f}",
            f"{one.tokens_per_second / one.layout.gpus:.0f}",
            f"{one.memory.total / GIB:.1f}",
            one.verdict,
        )
    yield table


def gauge(share: float, width: int = 5) -> str:
    """How full a device is."""
    filled = min(round(share * width), width)
    return "█" * filled + "░" * (width - filled)


def memory_bar(memory: DeviceMemory, capacity: float, width: int) -> Text:
    """One line as long as the device's memory: each part has a letter and a colour."""
    bar, used, drawn = Text("["), 0.0, 0
    room = width - 2
    for size, letter, colour in zip(
        memory.parts().values(), LETTERS, COLOURS, strict=True
    ):
        used += size
        until = min(round(used / capacity * room), room)
        bar.append(letter * (until - drawn), style=colour)
        drawn = until
    bar.append("." * (room - drawn), style="dim")
    return bar.append("]")


def memory_legend(memory: DeviceMemory, capacity: float, reserve: float) -> Text:
    """The letters of the bar, in GiB."""
    legend = Text()
    parts = memory.parts().items()
    for (name, size), letter, colour in zip(parts, LETTERS, COLOURS, strict=True):
        if size:
            legend.append(f"{letter} ", style=colour)
            legend.append(f"{name.replace('_', ' ')} {size / GIB:.1f}   ")
    free = (capacity - memory.total) / GIB
    legend.append(f". free {free:.1f}, of which {reserve / GIB:g} should stay free")
    return legend


def time_line(one: Estimate) -> str:
    """What a step's seconds are spent on."""
    parts = [f"{name} {spent:.2f}" for name, spent in one.parts.items() if spent]
    return ", ".join(parts)


def failures(result: SearchResult) -> Table:
    """Rejected layouts: each rule, how often, and an example."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("layouts", justify="right", no_wrap=True)
    table.add_column("for example")
    for one in result.rejected:
        table.add_row(one.rule, str(one.count), f"{one.example}: {one.why}")
    return table
