"""The six programs of the page "Will it run on NCCL?".

`test_transcripts` runs them. Here their transcripts show what the page states: both
forms pass on gloo, and on nccl-rules the right one alone.
"""

import re

import pytest

from tests.snippets.test_transcripts import ROOT
from xtrain_docs import authored

PAGE = "docs/en/lc1-communication/will-it-run-on-nccl.md"
RULE_OF = {
    "bitwise": "bitwise",
    "first_use": "first use",
    "one_queue": "one queue a pair",
    "overwritten": "overwritten",
    "tags": "tags",
    "watchdog": "watchdog",
}
FOLDER = ROOT / "snippets/wrong/lc1"


@pytest.mark.parametrize("name", RULE_OF)
def test_both_forms_pass_on_gloo_and_one_breaks_a_rule_of_nccl(name):
    printed = (FOLDER / f"nccl_{name}.out").read_text()
    runs = re.findall(r"^(gloo|nccl-rules), (right|wrong): (.*)", printed, re.MULTILINE)
    said = {(backend, form): text for backend, form, text in runs}
    assert said["gloo", "right"] == said["nccl-rules", "right"]
    assert all(said["gloo", form].startswith("[") for form in ("right", "wrong"))
    if name != "watchdog":  # whose wrong form is content with less
        assert said["gloo", "wrong"] == said["gloo", "right"]
    assert "nccl_rules" in said["nccl-rules", "wrong"].replace("-", "_")
    assert re.findall(r'\(rule "(.*?)"', printed) == [RULE_OF[name]]


def test_the_page_shows_all_of_them():
    programs = {f"nccl_{name}" for name in RULE_OF}
    assert {path.stem for path in FOLDER.glob("nccl_*.py")} == programs
    shown = authored.references()
    for program in programs:
        for kind in ("py", "out"):
            assert ROOT / PAGE in shown[f"snippets/wrong/lc1/{program}.{kind}"]
