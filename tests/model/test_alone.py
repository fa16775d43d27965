"""A model without ranks refuses a wrong batch itself: no exchange raises for it."""

import pytest
import torch

from xtrain.model import XtrainConfig, XtrainModel

CONFIG = XtrainConfig(
    vocab_size=17,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(2, 4, dtype=torch.long), r"\[2, 4\]"),
        (torch.full((2, 5), 17), "17"),
        (torch.zeros(2, 5), "float32"),
    ],
    ids=["shape", "value", "dtype"],
)
def test_wrong_labels_are_refused_before_the_first_layer(labels, said) -> None:
    model = XtrainModel(CONFIG)
    ran = []
    model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=said):
        model(torch.zeros(2, 5, dtype=torch.long), labels)
    assert not ran
    assert model(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5).long()) > 0
    assert ran
