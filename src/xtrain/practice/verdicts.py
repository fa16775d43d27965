"""What is wrong with a file, in words, from what its cases gave.

In this order, because one causes the next: it cannot be executed; a collective is
called that is to be written; it raises, or ranks wait for each other; values; bytes;
rounds.
"""

import re
from dataclasses import dataclass, replace
from itertools import chain

from xtrain.practice.drills import Drill
from xtrain.practice.outcomes import FILE, Outcome

OVERLAPPED = ("overlapped_all_to_all",)
"""Drills that are to compute while messages travel."""
LEAN = {
    "flash_attention_forward": "scores of one tile of queries and keys at a time",
    "flash_attention_backward": "scores of one tile of queries and keys at a time",
    "fully_sharded": "whole weights of a block only while it computes",
    "fully_sharded_prefetch": "whole weights of a block and the next one at most",
    "zero_2": "no gradient of a whole weight once its shard is reduced",
}
"""Drills that are to hold little memory at once, and what that is."""
MESSAGES = ("send", "recv_", "recv_any_source_", "barrier")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Is the file right, and what to tell its writer."""

    right: bool
    words: str
    mistake: str = ""
    """The words of the known mistake that it makes."""

    def more(self, sentence: str) -> "Verdict":
        """With a sentence after it, if there is one."""
        return replace(self, words=f"{self.words}\n{sentence}".rstrip())

    def known(self, words: str, line: int | None) -> "Verdict":
        """It does exactly what one with a known mistake does."""
        place = f" (line {line})" if line else ""
        return replace(self, mistake=words, words=f"{words}{place}\n{self.words}")


def verdict(drill: Drill, found: list[Outcome], expected: list[Outcome]) -> Verdict:
    """Of what a file gave, beside what the whiteboard form gives."""
    first = next((one for one in found if not one.right), None)
    called = collective_called(drill, found, expected)
    if first is not None and first.error and first.case == "importing the file":
        return Verdict(False, raised(first))
    if called:
        return Verdict(False, called)
    if first is None:
        timed = drill.folder == "comm" or drill.name in OVERLAPPED
        wrong = too_many_rounds(found, expected, drill) if timed else ""
        memory, times = more_memory(drill, found, expected)
        wrong = wrong or memory * (times > 1.6)
        right = Verdict(True, "Right on virtual ranks.")
        return Verdict(False, wrong) if wrong else right.more(memory)
    where = f"On {first.case}: " if first.case else ""
    if first.error == "Deadlock":
        where += deadlock(first)
    elif first.error:
        where += raised(first)
    else:
        where += wrong_values(first) or wrong_bytes(first)
    return Verdict(False, where + pattern(found))


def pattern(found: list[Outcome]) -> str:
    """ "Right on 1 rank, 2 ranks, 4 ranks", if only some cases fail."""
    right = [one.case for one in found if one.right]
    wrong = [one.case for one in found if not one.right]
    if not right:
        return ""
    return f"\nRight on {', '.join(right)}; wrong on {', '.join(wrong)}."


def raised(one: Outcome) -> str:
    """An exception, with the innermost line of the file."""
    words = plain(one.words.splitlines()[0] if one.words else "")
    told = not one.lines or "(line" in words
    place = "" if told else f" (line {one.lines[-1]})"
    if one.error == "RankTimeout":
        return f"an endless loop{place}: {words}."
    if one.error == "UnfinishedWork":
        title, *calls = [plain(line.strip()) for line in one.words.splitlines()]
        calls = list(dict.fromkeys(calls))
        more = f"; and {len(calls) - 2} more" if len(calls) > 2 else ""
        return f"{title} {'; '.join(calls[:2])}{more}"
    if one.error in ("InFlightError", "MismatchedCollectives"):
        return plain(" ".join(one.words.split()))
    if one.error == "OSError" and "[Errno 27]" in words:
        return f"it prints or writes more than 16 MB{place}: a loop without end?"
    if one.error == "EOFError":
        return f"it waits for input{place}."
    if one.error == "NotImplementedError":
        return f"there is a gap to fill{place}."
    if one.error == "SystemExit" and words.startswith("WRONG: "):
        return f"{words.removeprefix('WRONG: ')}."
    who, _, rest = words.partition(": ")
    if re.fullmatch(r"rank \d+", who):
        return f"{who} raises {one.error}: {rest}{place}"
    return f"{one.error}: {words}{place}"


def deadlock(one: Outcome) -> str:
    """Who waits for whom."""
    lines = [plain(line.strip()) for line in one.words.splitlines()[1:]]
    lines = [re.sub(r"barrier\(\).*", "has returned", line) for line in lines]
    calls = [line.partition(": ")[2] for line in lines if line]
    text = "ranks wait for each other without end.\n  " + "\n  ".join(lines[:8])
    places = {call.partition("(line ")[2].partition(")")[0] for call in calls}
    if len(places) != 1:
        return text
    if all(call.startswith("send(") for call in calls):
        text += "\nAll of them send first: post the receive together with the send."
    elif all(call.startswith("recv(") for call in calls):
        text += "\nAll of them receive first, so nothing is on its way to any of them."
    return text


def wrong_values(one: Outcome) -> str:
    """The first comparison that fails, on the first rank where it does."""
    for step in range(max(map(len, one.noted), default=0)):
        for rank, notes in enumerate(one.noted):
            if step < len(notes) and not notes[step].right:
                note = notes[step]
                off = [r for r, n in enumerate(one.noted) if step < len(n)
                       and not n[step].right]  # fmt: skip
                who = f"rank {rank}" if len(one.noted) > 1 else "wrong"
                others = ", ".join(map(str, off[1:]))
                be = "is rank" if len(off) == 2 else "are ranks"
                more = f" So {be} {others}." if others else ""
                return f"{who}: {note.problem or note.what}.{more}"
    return ""


def wrong_bytes(one: Outcome) -> str:
    """Values are right; a rank sends too much or too little."""
    rank, count = one.bytes_off()[0]
    text = f"values are right, but rank {rank} sends {count.nbytes:,.0f} bytes where "
    text += f"{count.formula} are {count.expected:,.0f}"
    if not count.nbytes:
        return f"{text}: the values came another way than by messages."
    if count.expected:
        text += f": {count.nbytes / count.expected:.2f} times as many"
    return text + "."


def collective_called(
    drill: Drill, found: list[Outcome], expected: list[Outcome]
) -> str:
    """A collective in a file that is to be made of messages."""
    if drill.folder != "comm":
        return ""
    allowed = {*MESSAGES, *(c for one in expected for c in one.calls)}
    for one in found:
        for name, line in one.calls.items():
            if name not in allowed:
                plain_name = name.strip("_").replace("_base", "")
                return (
                    f"Line {line} calls a collective of torch.distributed "
                    f"({plain_name}): build it of sends and receives."
                )
    return ""


def too_many_rounds(found: list[Outcome], expected: list[Outcome], drill: Drill) -> str:
    """Messages that could have been under way together, or while it computes."""
    for mine, best in zip(found, expected, strict=True):
        for place in range(min(map(len, [*mine.counted, *best.counted]), default=0)):
            took, needed = (
                max(counts[place].rounds for counts in one.counted)
                for one in (mine, best)
            )
            if took > needed + 0.5 and drill.name in OVERLAPPED:
                return (
                    f"On {mine.case}: values and bytes are right, but where a chunk "
                    f"and an exchange take 1 second each, it takes {took:.0f} seconds "
                    f"instead of {needed:.0f}: it waits for messages before it "
                    f"computes what does not need them."
                )
            if took > needed + 0.5:
                return (
                    f"On {mine.case}: values and bytes are right, but it takes "
                    f"{took:.0f} rounds of messages instead of {needed:.0f}: messages "
                    f"wait for one another that could be under way together."
                )
    return ""


def more_memory(
    drill: Drill, found: list[Outcome], expected: list[Outcome]
) -> tuple[str, float]:
    """Where a file holds more at once than the form, if that matters; how many times.

    Up to a fifth more is another way to write it.
    """
    worst, words = 1.2, ""
    for mine, best in zip(found, expected, strict=True):
        pairs = zip(*(chain(*one.counted) for one in (mine, best)), strict=False)
        for held, needed in ((here.held, there.held) for here, there in pairs):
            if drill.name in LEAN and needed and held > worst * needed:
                worst = held / needed
                words = (
                    f"On {mine.case}: values and bytes sent are right, but it holds "
                    f"{held:,.0f} bytes of tensors at once, {worst:.1f} times as many "
                    f"as the form, which holds {LEAN[drill.name]}."
                )
    return words, worst


def plain(text: str) -> str:
    """ "<your file>:14" is "line 14"."""
    text = re.sub(rf"(?:at )?{re.escape(FILE)}:(\d+)", r"(line \1)", text)
    text = re.sub(r" at /[\w/.-]+\.py:\d+", "", text)
    text = re.sub(r"group <xtrain[\w.]* object at 0x[0-9a-f]+>", "the group", text)
    text = re.sub(r"but rank (\d+(?:, \d+)+) has", r"but ranks \1 have", text)
    return text.replace("((", "(").replace("))", ")")
