"""The decoder on context ranks, alone and with tensor ranks, against the whole one."""

import pytest

from tests.model.context_cases import Case, train_all

MODEL = "xtrain.model.decoder:XtrainModel"
CUT = ("xtrain.model.context:SequenceCut", "xtrain.model.context:sequence_cut")
LOSS = "xtrain.model.loss:mean_cross_entropy"
SUMS = (
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
    "xtrain.model.gradient_sums:sum_gradients",
)
ONE_KEY = (("num_key_value_heads", 1),)
TIED = (("num_key_value_heads", 2), ("tie_word_embeddings", True))

ALONE = {
    1: [Case(1), Case(1, attention="ulysses")],
    2: [
        Case(2),
        Case(2, balance="striped", changes=TIED),
        Case(2, balance="none", changes=ONE_KEY),
        Case(2, attention="all_gather", balance="striped", changes=ONE_KEY),
        Case(2, attention="ulysses", changes=ONE_KEY),
    ],
    3: [
        Case(3, changes=ONE_KEY),
        Case(3, balance="striped"),
        Case(3, attention="all_gather", changes=TIED),
        Case(3, attention="ulysses", balance="none", changes=TIED),
    ],
    4: [
        Case(4, changes=TIED),
        Case(4, balance="none"),
        Case(4, attention="all_gather", balance="none"),
        Case(4, attention="ulysses"),
    ],
}


@pytest.mark.verifies(MODEL, LOSS, *CUT, *SUMS)
@pytest.mark.parametrize("size", ALONE)
def test_on_context_ranks_it_trains_as_one_device(world, size):
    """Logits, loss, every gradient and three clipped steps; other positions, too."""
    world(size).run(train_all, ALONE[size])


BESIDE_TENSOR = [
    Case(2, 2, changes=ONE_KEY),
    Case(2, 2, balance="striped", sequence_parallel=True, changes=TIED),
    Case(2, 2, "all_gather", sequence_parallel=True),
    Case(2, 2, "ulysses", sequence_parallel=True, changes=ONE_KEY),
    Case(2, 2, "ulysses"),
]


@pytest.mark.verifies(MODEL, LOSS, *CUT, *SUMS)
def test_with_tensor_ranks_besides_it_trains_as_one_device(world):
    world(4).run(train_all, BESIDE_TENSOR)
