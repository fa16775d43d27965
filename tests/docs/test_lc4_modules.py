"""Tables and pictures of lc4's modules: drawn from runs, refused when one disagrees."""

import re

import pytest

from xtrain.plan import ModelShape
from xtrain.plan.tensor_parallel import layer_calls
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import (
    embedding,
    grouped_heads,
    layer_memory,
    loss,
    modules,
    rope,
    runs_activations,
    runs_heads,
    runs_modules,
    runs_numbers,
)

ATTENTION = "xtrain.tensor_parallel.attention:ParallelAttention"
REPLICAS = (
    "xtrain.tensor_parallel.attention:key_replicas",
    "xtrain.tensor_parallel.attention:replica_ranks",
    "xtrain.comm.autograd:_IdentitySum",
)
MLP = "xtrain.tensor_parallel.mlp:ParallelSwiGLU"
GATHERED = "xtrain.tensor_parallel.gathered_mlp:AllGatherMLP"
FUNCTIONS = (
    "xtrain.tensor_parallel.functions:_ColumnLinear",
    "xtrain.tensor_parallel.functions:_RowLinear",
)
NORM = "xtrain.tensor_parallel.norm:ParallelRMSNorm"
EMBEDDINGS = (
    "xtrain.tensor_parallel.embedding:VocabParallelEmbedding",
    "xtrain.tensor_parallel.embedding:HiddenParallelEmbedding",
)
LOSS = (
    "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
    "xtrain.tensor_parallel.cross_entropy:_CrossEntropy",
)


@pytest.mark.verifies(ATTENTION, MLP, NORM, *FUNCTIONS, *EMBEDDINGS, *LOSS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_and_bytes_of_each_module_equal_the_formula(on_ranks, ranks):
    for module in modules.FORMULAS:
        found = modules.measured(module, ranks)
        assert len(found) == len(modules.FORMULAS[module])


def test_a_call_more_or_of_another_size_is_refused(on_ranks, monkeypatch):
    right = modules.FORMULAS["swiglu"]
    for wrong in (right[:1], (right[0], modules.backward("all-reduce", "bsf"))):
        monkeypatch.setitem(modules.FORMULAS, "swiglu", wrong)
        with pytest.raises(EvidenceError, match="swiglu, rank 0 of 2"):
            modules.measured("swiglu", 2)


@pytest.mark.parametrize("behind", ["", " sp"])
def test_the_modules_of_a_layer_send_what_the_plan_says(behind):
    shape = ModelShape(
        vocab_size=24,
        hidden_size=runs_modules.HIDDEN,
        intermediate_size=runs_modules.INNER,
        num_hidden_layers=1,
        num_attention_heads=runs_modules.HEADS,
    )
    sizes = (runs_modules.BATCH, runs_modules.SEQUENCE, 4)
    planned = layer_calls(shape, *sizes, sequence_parallel=bool(behind))
    ours = [
        (call.phase == "backward", modules.RING[call.op], modules.elements(call.size))
        for name in ("attention", "swiglu", "norm", "norm")
        for call in modules.FORMULAS[name + behind]
    ]
    assert sorted(ours) == sorted((c.backward, c.algorithm, c.numel) for c in planned)


@pytest.mark.verifies(MLP, GATHERED)
def test_gathering_after_each_layer_sends_five_halves_of_column_then_row(on_ranks):
    """For an inner size of 4 h: 5 h gathered, against 2 h for one all-reduce of h."""

    def sent(module, phase):
        calls = modules.measured(module, 4)
        return sum(out for when, _, _, out in calls if when == phase)

    for phase, times in (("forward", 5 / 2), ("backward", 5)):
        assert sent("column only", phase) == times * sent("swiglu", phase)
    table = modules.module_bytes().markdown()
    assert len(table) == 4
    drawing = modules.bytes_of_designs()
    assert "270" in drawing and "540" in drawing


@pytest.mark.verifies(ATTENTION, *REPLICAS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks"), [(8, 2, 4), (8, 8, 4), (4, 1, 4), (8, 4, 2)]
)
def test_every_rank_holds_the_keys_of_its_queries(on_ranks, heads, key_heads, ranks):
    found = runs.remembered(runs_heads.heads_held, ranks, heads, key_heads)
    drawing = grouped_heads.gqa_chart(found, heads)
    cells = heads + max(key_heads, ranks)
    assert len(re.findall('class="xt-bar-fill', drawing)) == cells
    found[0]["v"] = [key_heads]
    with pytest.raises(EvidenceError, match="rank 0 lacks a key"):
        grouped_heads.gqa_chart(found, heads)


@pytest.mark.verifies(ATTENTION, *REPLICAS)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_shares_of_a_key_heads_gradient_add_up_to_one(on_ranks, key_heads, monkeypatch):
    rows = grouped_heads.gqa_gradients(8, key_heads, 4).rows
    assert {row[-1] for row in rows} == {"1.000"}
    assert all(float(row[-2]) < 0.9 for row in rows)
    asked = (runs_heads.shares_of_key_gradient, 4, 8, key_heads)
    for part in ("alone", "summed, error"):
        wrong = runs.remembered(*asked)
        wrong[2][part] += 1e-6
        held = runs.remembered(runs_heads.heads_held, 4, 8, key_heads)
        results = iter([held, wrong])
        with monkeypatch.context() as patch:
            patch.setattr(runs, "remembered", lambda *_, of=results: next(of))
            with pytest.raises(EvidenceError):
                grouped_heads.gqa_gradients(8, key_heads, 4)


@pytest.mark.verifies(ATTENTION, *REPLICAS)
def test_replicas_send_each_other_their_gradients_once(on_ranks):
    rows = grouped_heads.gqa_traffic().rows
    assert [row[1] for row in rows] == ["1", "1", "2", "4"]
    assert [row[3] for row in rows[:2]] == ["-", "-"]
    two, four = (int(row[3].replace("\u00a0", "")) for row in rows[2:])
    assert four == 3 * two > 0


def test_the_scaling_slows_slow_pairs_only(on_ranks):
    (found,) = runs.remembered(runs_numbers.rope_slowdown, 1, -2, 4, 8)
    assert all(slower == pytest.approx(8) for turns, slower in found if turns <= 1)
    assert all(slower == pytest.approx(1) for turns, slower in found if turns >= 4)
    between = [slower for turns, slower in found if 1 < turns < 4]
    assert between == sorted(between, reverse=True)
    assert rope.rope_slowing().startswith("<svg")


@pytest.mark.verifies(EMBEDDINGS[0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_id_is_looked_up_by_one_rank(on_ranks, ranks):
    ids = [0, 3, 4, 7, 4]
    found = runs.remembered(runs_numbers.embedding_parts, ranks, ids, 8)
    drawing = embedding.embedding_chart(found, ids)
    assert drawing.count(">row 4</text>") == 4  # twice looked up, twice in the sum
    found[0]["partial"][2] = 5.0  # a second owner of id 4
    with pytest.raises(EvidenceError, match="id 4" if ranks == 2 else "id"):
        embedding.embedding_chart(found, ids)


@pytest.mark.verifies(*LOSS)
def test_the_three_numbers_of_a_token_give_its_loss(on_ranks):
    logits = [list(row) for row in loss.LOGITS]
    labels = list(loss.LABELS)
    for ranks in (2, 4):
        found = runs.remembered(runs_numbers.loss_parts, ranks, logits, labels)
        assert "loss = log 1.553 - (-3) = 3.440" in loss.loss_chart(found)
    found[1]["losses"][0] += 1e-6
    with pytest.raises(EvidenceError, match="token 0"):
        loss.loss_chart(found)


@pytest.mark.verifies(*LOSS)
def test_the_loss_keeps_its_columns_and_the_gradient_lies_in_them(
    on_ranks, monkeypatch
):
    rows = loss.loss_memory().rows
    assert [round(float(row[-1])) for row in rows] == [1, 2, 3, 4]
    monkeypatch.setattr(loss, "loss_bytes", lambda *_: 0)
    with pytest.raises(EvidenceError, match="gathered=True"):
        loss.loss_memory()


@pytest.mark.verifies(*LOSS)
def test_large_logits_overflow_without_the_maximum_only(on_ranks):
    rows = loss.large_logits().rows
    assert [row[-1] for row in rows[2:]] == ["inf", "inf"]
    assert all(row[2] == row[3] for row in rows)
    assert all(row[4] == row[3] for row in rows[:2])


@pytest.mark.verifies(ATTENTION, MLP, NORM, *FUNCTIONS)
@pytest.mark.parametrize("layer", ["classic", "ours"])
def test_what_a_layer_keeps_equals_the_formula(on_ranks, layer, monkeypatch):
    rows = layer_memory.layer_memory(layer).rows
    whole, *cut = (int(row[2].replace("\u00a0", "")) for row in rows)
    angles = {"classic": 0, "ours": 4 * 48 * 96 // 12}[layer]
    assert cut == [(whole - angles) // n + angles for n in (2, 4)]
    assert layer_memory.layer_memory_bars(layer).startswith("<svg")
    monkeypatch.setitem(runs_activations.SIZES, "heads", 6)
    with pytest.raises(EvidenceError, match=f"{layer}, 1 ranks"):
        layer_memory.layer_memory(layer)


def test_the_classic_formula_is_the_published_one(on_ranks):
    """Without the norms' numbers: s b h (34 + 5 a s / h), and its parts on t ranks."""
    sizes = {"batch": 1, "sequence": 2048, "hidden": 12288, "heads": 96}
    tokens = 2048 * 12288
    norms = 8 * 2048
    assert layer_memory.classic_bytes(1, False, **sizes) - norms == tokens * (34 + 80)
    cut = layer_memory.classic_bytes(8, False, **sizes) - norms
    assert cut == tokens * (10 + 24 / 8 + 80 / 8)
    assert layer_memory.classic_bytes(8, True, **sizes) - norms / 8 == tokens * 114 / 8


def test_a_fused_layer_of_llama_3_8b_keeps_34_h_a_token():
    (row, *_) = layer_memory.modern_layers(sequence=8192).rows
    assert row[1] == f"{(34 * 4096 + 4 * 32) * 8192 / 2**30:.3g} GiB"
