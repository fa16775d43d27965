"""What the pages on the whole model draw: calls, bytes and ranges, held to formulas."""

from math import prod

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import file_reads, model, runs_model, slices

LAYER = (
    "xtrain.model.layer:DecoderLayer",
    "xtrain.tensor_parallel.attention:ParallelAttention",
    "xtrain.tensor_parallel.mlp:ParallelSwiGLU",
    "xtrain.tensor_parallel.functions:column_linear",
    "xtrain.tensor_parallel.functions:row_linear",
)
ENDS = (
    "xtrain.tensor_parallel.embedding:VocabParallelEmbedding",
    "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
)
SLICED = ("xtrain.tensor_parallel.norm:ParallelRMSNorm",)


@pytest.mark.verifies(*LAYER, *ENDS, *SLICED)
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_part_sends_the_formulas_elements_forward_and_backward(
    on_ranks, ranks, sliced
):
    """Odd batch and sequence; the busiest part of the formula said once more here."""
    found = model.measured(ranks, sliced)
    moved = runs_model.BATCH * runs_model.sequence_of(ranks, sliced) * runs_model.HIDDEN
    rows = runs.remembered(runs_model.traffic, ranks, sliced, 12)
    sums = {
        way: sum(row["layer"][way]["sent"] for row in rows)
        for way in ("forward", "backward")
    }
    assert sums["forward"] == 4 * moved * (ranks - 1)  # 4 bsh (t-1)/t a rank
    norms = 2 * 2 * runs_model.HIDDEN * (ranks - 1)
    regathered = 2 * moved * (ranks - 1)
    extra = norms + regathered if sliced else 0
    assert sums["backward"] == sums["forward"] + extra
    assert found["loss"][1] == ({}, 0)


@pytest.mark.verifies("xtrain.comm.autograd:identity_sum", LAYER[1])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 1), (3, 1), (4, 2), (4, 1)])
def test_ranks_with_one_key_head_send_its_gradients_besides(
    on_ranks, ranks, key_heads, sliced
):
    model.measured(ranks, sliced, key_heads)


def test_other_traffic_is_refused(on_ranks, monkeypatch):
    wrong = {**model.WHOLE, "layer": ({"all_reduce": 2}, {"all_reduce": 3})}
    monkeypatch.setattr(model, "WHOLE", wrong)
    with pytest.raises(EvidenceError, match="layer, backward=True, rank 0 of 2"):
        model.measured(2, False)


LOAD = "xtrain.model.hf_load:load_hf"


@pytest.mark.verifies(LOAD)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_every_element_of_a_file_and_their_own_only(on_ranks, ranks):
    found = runs.remembered(runs_model.ranges_read, ranks)
    for name, shape in found[0]["shapes"].items():
        read = [set() for _ in found]
        for mine, one in zip(read, found, strict=True):
            for low, high in file_reads.elements(name, shape, one["asked"]):
                assert not mine & set(range(low, high)), "read twice"
                mine |= set(range(low, high))
        assert set().union(*read) == set(range(prod(shape)))
        for mine in read:
            whole = len(shape) == 1
            replicas = max(1, ranks // 2) if name[-13:-9] in ("k_pr", "v_pr") else 1
            share = 1 if whole else ranks // replicas
            assert len(mine) == prod(shape) // share, name
    file_reads.bytes_read()


def test_the_pictures_fit_a_phone_and_show_every_rank(on_ranks):
    for drawing in (file_reads.bytes_of_a_file(), slices.slices_of_a_model()):
        assert 'viewBox="0 0 400 ' in drawing
        assert all(f"xt-s{rank}" in drawing for rank in range(4))


@pytest.mark.verifies("xtrain.model.placement:placement_of")
def test_the_picture_says_how_many_ranks_hold_the_same(on_ranks):
    drawing = slices.slices_of_a_model()
    for said in (
        "embed_tokens: a slice each",
        "k_proj: 2 hold the same",
        "o_proj: a slice each",
        "last norm: whole on all",
    ):
        assert said in drawing
