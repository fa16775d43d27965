"""The map of lectures on the first page, and what belongs to each of them."""

import re

from .. import config, guards
from . import REGISTRY, Table

SEPARATOR = " \u00b7 "
LECTURES = (
    ("lc1-communication", "Communication",
     "Send and receive, then every collective built from them: ring, tree, halving and "
     "doubling, all-to-all. What each one sends, to the byte."),
    ("lc2-data-parallel", "Data parallel",
     "One copy of the model on every device, gradients averaged in buckets while the "
     "backward pass still runs."),
    ("lc3-zero", "ZeRO and mixed precision",
     "Optimizer states, gradients and parameters cut into shards; Adam and loss "
     "scaling written out."),
    ("lc4-tensor-parallel", "Tensor parallel",
     "Layers cut by columns and rows, with the two communications that make them "
     "whole."),
    ("lc5-pipeline-parallel", "Pipeline parallel",
     "Schedules as data: GPipe, 1F1B, interleaved, zero bubble, DualPipe, drawn and "
     "run."),
    ("lc6-context-parallel", "Context parallel",
     "Attention over sequences too long for one device: ring attention and Ulysses."),
    ("lc7-expert-parallel", "Expert parallel",
     "Routers, dispatch and balance of mixture-of-experts models."),
    ("lc8-all-together", "All together",
     "One mesh, one script and one trainer for all of them."),
)  # fmt: skip
"""Folder of the pages, title, and what it is about."""


BESIDE = (
    ("interview", "Interview", "question", guards.QUESTION, "answered short and long"),
    ("bugs", "Bugs", "classic bug", re.compile(r"^##.*\{#b\d+\}"),
     "run next to the right code"),
    ("errata", "Errata", "erratum", re.compile(r"^##.*\{#e\d+\}"),
     "in the notes this grew from, each put right with its proof"),
    ("benchmarks", "Races", "", None, "against torch, what was lost included"),
)  # fmt: skip
"""Folders that have a page for each lecture: what its link says on the first page; what
is counted on the page, by which line; what is said of it."""

MATH = {
    "lc1": (("communication math", "planning/communication-math.md"),
            ("ring or tree?", "labs/ring_or_tree.py")),
    "lc2": (("rules of thumb, tested", "planning/rules-of-thumb.md"),),
    "lc3": (("memory math", "planning/memory-math.md"),
            ("which stage of ZeRO?", "planning/what-each-cuts.md#zero"),
            ("memory calculator", "planning/memory-calculator.md")),
    "lc4": (("which traffic on which link", "planning/what-each-cuts.md#links"),),
    "lc5": (("bubbles", "planning/compute-math.md#bubble"),
            ("pipeline explorer", "planning/pipeline-explorer.md")),
    "lc6": (("what each parallelism cuts", "planning/what-each-cuts.md"),),
    "lc7": (("what each parallelism cuts", "planning/what-each-cuts.md"),),
    "lc8": (("rules of thumb, tested", "planning/rules-of-thumb.md"),
            ("layout planner", "planning/layout-planner.md")),
}  # fmt: skip
"""Pages of the tab "Math" that a lecture leads to."""

MORE_RACES = {"lc1": (("backends", "backends"),)}
PLURALS = {"erratum": "errata"}


def _beside(lecture: str) -> list[tuple[str, str, str]]:
    """Heading, Markdown link with a count, and a word on it, for what there is."""
    rows = []
    for folder, heading, one, line, words in BESIDE:
        page = config.PAGES / folder / f"{lecture}.md"
        if not page.is_file():
            continue
        text = heading.lower()
        if line is not None:
            count = sum(1 for row in page.read_text().splitlines() if line.match(row))
            text = f"{count} {one if count == 1 else PLURALS.get(one, one + 's')}"
        links = [f"[{text}](/{folder}/{lecture}.md)"]
        if folder == "benchmarks":
            links += [
                f"[{word}](/{folder}/{name}.md)"
                for name, word in MORE_RACES.get(lecture, ())
            ]
        rows.append((heading, SEPARATOR.join(links), words))
    if lecture in MATH:
        pages = (*MATH[lecture], ("choosing a layout", "planning/index.md"))
        links = [f"[{text}](/{page})" for text, page in pages]
        rows.append(("Math", SEPARATOR.join(links), "computed for models of real size"))
    return rows


@REGISTRY
def lecture_links(lecture: str) -> Table:
    """What belongs to a lecture but lies elsewhere, counted: for its index page."""
    rows = _beside(lecture)
    if not rows:
        raise ValueError(f"no page of questions, bugs, errata or races for {lecture!r}")
    return Table(("", "", ""), rows)


@REGISTRY
def lecture_map() -> list[str]:
    """All lectures and what goes with them, as a list that is laid out as cards."""
    lines: list[str] = []
    for folder, title, text in LECTURES:
        lecture = folder.partition("-")[0]
        links = [
            f"[{heading}]({place}/{lecture}.md)"
            for place, heading, *_ in BESIDE
            if (config.PAGES / place / f"{lecture}.md").is_file()
        ]
        lines += [f"-   [{title}]({folder}/index.md)", "", f"    {text}", ""]
        lines += [f"    {SEPARATOR.join(links)}", ""]
    return lines
