"""What the page on context ranks draws and counts, held to formulas."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import model

MODEL = (
    "xtrain.model.layer:DecoderLayer",
    "xtrain.model.context:SequenceCut",
    "xtrain.model.span:DecoderSpan",
    "xtrain.model.span_weights:SpanWeights",
)


@pytest.mark.verifies(*MODEL)
def test_a_layer_sends_the_formulas_bytes_with_each_attention(on_ranks):
    """And all else nothing, but one sum of the gradients in the end."""
    table = model.context_layer_bytes()
    assert len(table.rows) == 18
    cells = {
        tuple(row[:3]): [int("".join(cell.split())) for cell in row[3:]]
        for row in table.rows
    }
    # of 3 rows, 12 local tokens, 2 elements a head, 8 bytes: one hop on 2 ranks
    keys = 2 * 3 * 12 * 2 * 8
    assert cells["ring", "12", "2"] == [12 * keys, 12 * keys * 3]
    assert cells["ring", "1", "2"] == [keys, keys * 3]
    assert cells["all-gather", "1", "2"] == [keys, keys * 2]
    rows = model.context_gradient_bytes().rows
    assert [row[0] for row in rows] == ["2", "3", "4"]


@pytest.mark.parametrize("part", ["forward", "ends", "gradients"])
def test_other_traffic_than_the_formulas_is_refused(monkeypatch, part):
    right = {"forward": 12 * 1152, "backward": 36 * 1152, "ends": 0, "gradients": 800,
             "parameters": 100}  # fmt: skip

    def found(*_):
        return [{"ring 12": right}, {"ring 12": right | {part: right[part] + 8}}]

    monkeypatch.setattr(runs, "remembered", found)
    with pytest.raises(EvidenceError, match="formula|for gradients"):
        model.measured("ring", 2, 12)
    monkeypatch.setattr(runs, "remembered", lambda *_: [{"ring 12": right}] * 2)
    assert model.measured("ring", 2, 12) == right


@pytest.mark.verifies(MODEL[1])
def test_the_picture_has_every_token_once_with_each_balance(on_ranks, monkeypatch):
    drawing = model.tokens_of_context_ranks()
    assert 'viewBox="0 0 400 ' in drawing
    for said in ("none: rank 0 has [0, 1, 2, 3]", "striped: rank 0 has [0, 4, 8, 12]",
                 "zigzag: rank 0 has [0, 1, 14, 15]"):  # fmt: skip
        assert said in drawing
    assert drawing.count("<title>token") == 3 * 16
    twice = {"none": [0, 1], "striped": [0, 1], "zigzag": [0, 1]}
    monkeypatch.setattr(runs, "remembered", lambda *_: [twice] * 4)
    with pytest.raises(EvidenceError, match="not every token"):
        model.tokens_of_context_ranks()
