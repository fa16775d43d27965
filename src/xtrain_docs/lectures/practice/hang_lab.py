"""The hang lab as a page: each job's output and dumps, a form, and its answer."""

import html
from dataclasses import dataclass

from xtrain.practice.hang_lab import lab

from ...tables import REGISTRY

STYLE = '<div><link href="../../assets/drill.css" rel="stylesheet"></div>'
"""With `href` first, `publish` leaves it a file of its own."""
WORDS = {"none": "no call: it is no hang", "all": "all alike"}


@dataclass(frozen=True)
class Lab:
    """Markdown: without scripts the answers are there, folded."""

    def markdown(self) -> list[str]:
        faults = enumerate(lab.faults(), 1)
        lines = (line for number, one in faults for line in part(number, one))
        return [STYLE, "", *lines]


def part(number: int, one: lab.Fault) -> list[str]:
    """One job: headline, what it left, the form, the answer."""
    answer = [
        one.why, "", f"**Right.** {one.cure}", "",
        "What `xtrain hang` tells of these files:", "",
        *fence("text", lab.report(one)), "The job:", "", *fence("py", one.source),
    ]  # fmt: skip
    return [
        '<div data-search-exclude markdown="1">', "",
        f"### {number}. {one.title} {{#{one.job}}}", "",
        "Output:", "", *fence("text", lab.output(one)),
        "Flight recorders:", "", *fence("text", lab.calls(one)),
        form(one), "",
        '??? success "The answer"', "",
        *(f"    {line}".rstrip() for line in answer), "",
        "</div>", "",
    ]  # fmt: skip


def fence(language: str, text: str) -> list[str]:
    return [f"```{language}", *text.splitlines(), "```", ""]


def form(one: lab.Fault) -> str:
    """Two choices and a button; `hang-lab.mjs` shows it and judges by what it has."""
    right, *_ = calls = one.call.split()
    wrong_call = next(call for call in lab.CALLS if call not in calls)
    ranks = {
        rank: "" if rank == one.rank else lab.judge(one, rank, right).words
        for rank in lab.RANKS
    }
    why = html.escape(lab.judge(one, one.rank, wrong_call).words)
    return (
        f'<form class="xt-desk" hidden data-call="{one.call}" data-wrong="{why}">'
        '<div class="xt-desk-bar">'
        + choice("Rank", "rank", ranks)
        + choice("Call", "call", dict.fromkeys(lab.CALLS, ""))
        + '<button class="md-button" type="submit">Check</button></div>'
        '<p class="xt-says-verdict" role="status"></p></form>'
    )


def choice(label: str, name: str, wrong: dict[str, str]) -> str:
    """A choice; an option that is wrong may tell why."""
    inside = "".join(
        f'<option value="{value}" data-wrong="{html.escape(why)}">'
        f"{WORDS.get(value, value)}</option>"
        for value, why in wrong.items()
    ).replace(' data-wrong=""', "")
    return (
        f'<label>{label}<select name="{name}" required>'
        f'<option value="">choose</option>{inside}</select></label>'
    )


@REGISTRY
def hang_lab() -> Lab:
    """All jobs of the lab."""
    return Lab()
