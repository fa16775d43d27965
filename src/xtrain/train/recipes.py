"""The recipes that come along: small models of bytes, which any machine trains.

Their sizes are divisible by 2, 3 and 4, so that each axis of a layout can be of these
sizes.
"""

from collections.abc import Callable

from xtrain.model.config import XtrainConfig
from xtrain.train.rates import Rate
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data, Log, OptimizerSpec, SampleSpec

BYTES = 257
"""An id for each byte, and one for the end of a document."""


def dense_bytes() -> Recipe:
    """A dense decoder of half a million parameters, trained in half a minute."""
    model = XtrainConfig(
        vocab_size=BYTES,
        padded_vocab_size=264,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=12,
        initializer_range=0.06,
    )
    return Recipe(
        steps=320,
        global_batch=8,
        model=model,
        data=Data(sequence=144),
        optimizer=OptimizerSpec(lr=6e-3),
        rate=Rate(kind="cosine", warmup=20),
        log=Log(every=40),
        sample=SampleSpec(prompt="def ", tokens=160, temperature=0.7),
    )


def tiny_experts() -> Recipe:
    """A decoder with 12 experts a layer, of which a token uses 2."""
    model = XtrainConfig(
        vocab_size=BYTES,
        padded_vocab_size=264,
        hidden_size=96,
        intermediate_size=240,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_local_experts=12,
        num_experts_per_tok=2,
        moe_intermediate_size=120,
        first_k_dense_replace=1,
        router_aux_loss_coef=0.01,
    )
    return Recipe(
        steps=200,
        global_batch=12,
        model=model,
        data=Data(sequence=144),
        optimizer=OptimizerSpec(lr=3e-3),
        rate=Rate(kind="wsd", warmup=20),
    )


BUILT_IN: dict[str, Callable[[], Recipe]] = {
    "bytes": dense_bytes,
    "tiny-experts": tiny_experts,
}
"""By the name on the command line."""
