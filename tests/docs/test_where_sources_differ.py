"""The appendix on sources that differ: its rows, and what they print and compute."""

import re
from dataclasses import replace

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import Accelerator, ModelShape
from xtrain_docs import config
from xtrain_docs.lectures.planning.common import gpt_shape
from xtrain_docs.lectures.planning.where_sources_differ import (
    dualpipe_idle,
    korthikanti_extra_share,
)

NAME = "planning/where-sources-differ.md"
SUBJECTS = ("memory", "compute", "schedules", "messages", "models")
GIB = 2**30


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_row_has_two_sides_and_what_is_taken(subject):
    rows = page_rows(NAME, f"{subject} | one source")
    assert len(rows) >= 4
    for row in rows:
        assert len(row) == 4 and all(row), row
        one, other, _ = row[1:]
        assert one != other


def test_every_link_of_a_row_has_its_address():
    text = (config.PAGES / NAME).read_text()
    named = set(re.findall(r"^\[([^\]]+)\]: https://", text, re.MULTILINE))
    words = re.sub(r"\{\{.*?\}\}|```.*?```", "", text, flags=re.DOTALL)
    words = re.sub(r"\]\{[^}]*\}|\]\([^)]*\)|^\[.*$", "", words, flags=re.MULTILINE)
    used = {b or a for a, b in re.findall(r"\[([^\[\]]+)\](?:\[([^\]]+)\])?", words)}
    assert named and used == named


# --------------------------------------------------------------------------- memory


def test_the_sources_numbers_come_out_of_their_formulas():
    """Printed values: the Playbook's figures, and Korthikanti et al., section 4.3."""
    for sizes, printed in (((4096, 32, 32), 25.98), ((16384, 128, 126), 1519.99)):
        shape = replace(gpt_shape(*sizes, 128256), max_position_embeddings=1024)
        assert 4 * shape.parameters / GIB == pytest.approx(printed, abs=0.005)
    assert 0.0050 < korthikanti_extra_share() < 0.0057


# ------------------------------------------------------------------------ schedules


def test_dualpipes_form_holds_for_equal_times_only():
    equal, other = (1, 2, 1, 3), (1, 2.2, 0.9, 3.2)
    assert dualpipe_idle(False, *equal) == 6
    assert dualpipe_idle(True, *equal) == 6
    assert dualpipe_idle(False, *other) == pytest.approx(8.1)
    assert dualpipe_idle(True, *other) == pytest.approx(7.2)


# ------------------------------------------------------------------------- messages


def test_published_formulas_beside_ours():
    rows = page_rows(NAME, "what |")
    theirs, ours = ([row[i].replace(" ", "") for row in rows] for i in (2, 3))
    assert (theirs[0], ours[0]) == ("25165824", "176160768")
    assert int(ours[0]) == 7 * int(theirs[0])
    assert float(ours[2]) == pytest.approx(2 * float(theirs[2]), rel=1e-3)
    assert float(ours[3]) == pytest.approx(2 * float(theirs[3]), rel=5e-3)
    assert theirs[1].endswith("G")  # a ratio of 75 thousand million
    device, ratio = Accelerator.preset("h100"), 7 / 8 / 8192
    expected = ratio * device.flops / device.network.bandwidth
    assert float(ours[1]) == pytest.approx(expected, rel=2e-3)


# --------------------------------------------------------------------------- models


def test_a_list_has_the_sizes_of_llama_3_8b_for_llama_2_7b():
    listed = replace(ModelShape.preset("llama-2-7b"), vocab_size=128256,
                     num_key_value_heads=8, intermediate_size=14336)  # fmt: skip
    assert listed.parameters == ModelShape.preset("llama-3-8b").parameters


def test_sizes_of_deepseek_v3_that_the_page_takes_for_granted():
    shape = ModelShape.preset("deepseek-v3")
    sizes = shape.vocab_size, shape.hidden_size, shape.num_hidden_layers
    assert sizes == (129280, 7168, 61)
    assert shape.parameters_of_layer(60) == 11_507_286_272
