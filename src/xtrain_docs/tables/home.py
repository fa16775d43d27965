"""The map of lectures on the first page."""

from dataclasses import dataclass

from .. import config
from . import REGISTRY

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
)  # fmt: skip
"""Folder of the pages, title, and what it is about."""


@dataclass(frozen=True)
class Cards:
    """A list of titles and texts, which the style sheet lays out as cards."""

    cards: tuple[tuple[str, str, str, list[str]], ...]

    def markdown(self) -> list[str]:
        """One list item per card: title, text, links to more, state."""
        lines: list[str] = []
        for title, text, state, links in self.cards:
            lines += [f"-   {title}", "", f"    {text}", ""]
            if links:
                lines += [f"    {SEPARATOR.join(links)}", ""]
            if state:
                lines += [f"    *{state}*", ""]
        return lines


BESIDE = (
    ("bugs", "Bugs"), ("interview", "Interview"), ("errata", "Errata"),
    ("benchmarks", "Races"),
)  # fmt: skip
"""Folders that have a page for each lecture, and what its link says."""


@REGISTRY
def lecture_map() -> Cards:
    """All lectures and what goes with them; one without pages is in preparation."""
    cards = []
    for folder, title, text in LECTURES:
        page = f"{folder.partition('-')[0]}.md"
        links = [
            f"[{word}]({beside}/{page})"
            for beside, word in BESIDE
            if (config.PAGES / beside / page).is_file()
        ]
        if (config.PAGES / folder / "index.md").is_file():
            cards.append((f"[{title}]({folder}/index.md)", text, "", links))
        else:
            cards.append((title, text, "In preparation", []))
    return Cards(tuple(cards))
