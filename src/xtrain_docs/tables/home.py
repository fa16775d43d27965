"""The map of lectures on the first page."""

from dataclasses import dataclass

from .. import config
from . import REGISTRY

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

    cards: tuple[tuple[str, str, str], ...]

    def markdown(self) -> list[str]:
        """One list item per card: title, text, state."""
        lines: list[str] = []
        for title, text, state in self.cards:
            lines += [f"-   {title}", "", f"    {text}", ""]
            if state:
                lines += [f"    *{state}*", ""]
        return lines


@REGISTRY
def lecture_map() -> Cards:
    """All lectures; one without pages is said to be in preparation."""
    return Cards(
        tuple(
            (f"[{title}]({folder}/index.md)", text, "")
            if (config.PAGES / folder / "index.md").is_file()
            else (title, text, "In preparation")
            for folder, title, text in LECTURES
        )
    )
