"""The page "Tell it in three minutes": how long its parts take aloud."""

import re

from ... import config
from ...values import value

WORDS_A_MINUTE = 140
"""At a calm pace, as one speaks to somebody who listens for the first time."""
SECTION = re.compile(r"^## .*\{#(?P<anchor>\w+)\}$", re.MULTILINE)
SPOKEN = re.compile(r"^\*\*(?:Ours|Say)\.\*\* (?P<words>.+)$", re.MULTILINE)
UNSPOKEN = re.compile(r"\]\([^)]*\)|[\[*]")


@value
def story_seconds(*anchors: str) -> int:
    """Seconds of our example in these sections, to the nearest five; of all if none."""
    parts = spoken()
    words = sum(parts[anchor] for anchor in anchors or STEPS)
    return 5 * round(60 * words / WORDS_A_MINUTE / 5)


STEPS = ("what", "why", "proof", "hardest", "numbers", "next")


def spoken() -> dict[str, int]:
    """Words that are said aloud, by section; a computed number is two words."""
    text = (config.PAGES / "tell-it.md").read_text(encoding="utf-8")
    heads = list(SECTION.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found = {}
    for head, end in zip(heads, ends, strict=True):
        said = " ".join(SPOKEN.findall(text[head.end() : end]))
        plain = UNSPOKEN.sub("", re.sub(r"\{\{.*?\}\}", "one half", said))
        found[head["anchor"]] = len(plain.split())
    return found
