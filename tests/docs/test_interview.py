"""The interview's pages: worked scenarios, and what their numbers rest on."""

import re

import pytest
import torch

from xtrain.plan import LINKS
from xtrain.zero import AdamW
from xtrain_docs import config
from xtrain_docs.lectures.interview import story
from xtrain_docs.lectures.interview.scenarios import LOW_MFU, adam_jump, low_mfu

STEPS = ("Clarify.", "Estimate.", "Choose.", "What would change it.",
         "What can go wrong.")  # fmt: skip
SCENARIOS = (config.PAGES / "interview/scenarios.md").read_text()
WORKED = [
    part.split("\n## ")[0]
    for part in re.split(r"^\?\?\? question ", SCENARIOS, flags=re.M)[1:]
]


def words(markdown: str) -> int:
    """How many are read: a computed value is one, an address none."""
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"\{\{.*?\}\}", "1", markdown))
    return len(plain.split())


@pytest.mark.parametrize("text", WORKED, ids=lambda text: text[:24])
def test_a_scenario_is_worked_in_five_steps(text):
    assert len(WORKED) == 8
    at = [text.find(f"\n    *{step}*") for step in STEPS]
    assert at[0] > 0 and at == sorted(at)
    first = re.search(r"\*\*(.+?)\*\*\n    \{: #[\w-]+ \}", text, re.S)
    assert 35 <= words(first[1]) <= 65  # 20 s, at a calm pace
    body, proof = text.split("Proof: ")
    assert 250 <= words(body.split("\n", 1)[1]) <= 450
    assert "test:tests/" in proof
    assert "whiteboard.md#" in proof or "test_checkpoint.py" in proof


def test_what_explains_an_mfu_that_fell_by_a_third_and_what_does_not():
    found = {what: low_mfu(what).mfu for what in LOW_MFU}
    assert found[""] == pytest.approx(0.45, abs=0.015)
    assert found["network"] > 0.97 * found[""]
    for what in ("recompute", "unfused", "few", "nodes"):
        assert found[what] < 0.77 * found[""], what
    again = low_mfu("recompute")
    assert again.hfu == pytest.approx(low_mfu().hfu, rel=0.02)  # it computes as fast
    assert all(low_mfu(what).layout.gpus == 64 for what in LOW_MFU)
    half = LOW_MFU["network"][1]["network"]
    assert 2 * half == LINKS["infiniband-ndr"].bandwidth


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_gradient_that_jumps_moves_adam_as_far_as_the_page_says(beta2):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = AdamW([weight], lr=1.0, betas=(0.9, beta2), eps=0.0, weight_decay=0.0)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for step in range(20000):
        weight.grad = sign[step % 2].reshape(1).clone()
        adam.step()
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, 100.0)
    adam.step()
    moved = float(before - weight.detach())
    # Alternating signs leave a momentum of a twentieth of one gradient.
    assert moved == pytest.approx(adam_jump(100, beta2), rel=0.01)


def test_each_step_of_the_story_has_sentences_seconds_a_trap_and_ours():
    text = (config.PAGES / "tell-it.md").read_text()
    parts = re.split(r"^## .* \{#(\w+)\}$", text, flags=re.M)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(found) == [*story.STEPS, "ninety", "further"]
    for step in story.STEPS:
        marks = ("- **Fill in**: ", "- **Seconds**: ", "- **Trap**: ", "**Ours.** ")
        at = [found[step].find(f"\n{mark}") for mark in marks]
        assert at[0] > 0 and at == sorted(at), step
        assert f'story_seconds("{step}")' in found[step]
        assert 20 <= story.story_seconds(step) <= 60, step


def test_the_story_takes_three_to_four_minutes_and_its_cut_about_ninety_seconds():
    assert 180 <= story.story_seconds() <= 240
    assert 70 <= story.story_seconds("ninety") <= 100
    words = sum(story.spoken()[step] for step in story.STEPS)
    assert story.story_seconds() == pytest.approx(60 * words / 140, abs=3)


def test_words_that_are_spoken_are_counted(tmp_path, monkeypatch):
    (tmp_path / "tell-it.md").write_text(
        "## A {#what}\n\n- **Trap**: not said\n\n"
        "**Ours.** I wrote [a ring](x.md) of {{ f(1) }} *steps*.\n\n## B {#why}\n"
    )
    monkeypatch.setattr(story.config, "PAGES", tmp_path)
    assert story.spoken() == {"what": 8, "why": 0}
