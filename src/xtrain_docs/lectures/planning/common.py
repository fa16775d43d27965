"""What several pages on planning compute: sizes of papers, and bytes of a step."""

from dataclasses import replace

from xtrain.plan import GPTShape, Layout, ModelShape, traffic_per_step
from xtrain.plan.published import GPT_3

from ...values import VALUES, value

SEQUENCE = 8192
VALUES["all_axes"] = Layout(tensor=4, context=2, pipeline=2, data=8, expert=8, zero=1,
                            sequence_parallel=True, micro_batches=32)  # fmt: skip
"""Every axis that a model with experts can have."""


@value
def gpt_shape(h: int, heads: int, layers: int, vocabulary: int = 51200) -> GPTShape:
    """A GPT with an MLP four times as wide, as Megatron's papers have it."""
    return replace(
        GPT_3, vocab_size=vocabulary, hidden_size=h, intermediate_size=4 * h,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=h // heads,
    )  # fmt: skip


def playbook_shape(layers: int, h: int, inner: int, tied: bool = False) -> ModelShape:
    """A model of the Playbook's benchmarks: heads of 128, and no grouped keys."""
    return ModelShape(
        vocab_size=131_072, hidden_size=h, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=h // 128,
        tie_word_embeddings=tied,
    )  # fmt: skip


@value
def step_bytes(model: str, dtypes: str, layout: Layout) -> float:
    """What a device of the first pipeline rank sends in a step."""
    shape = ModelShape.preset(model)
    sent = traffic_per_step(shape, layout, SEQUENCE, dtypes=dtypes)
    return float(sum(transfer.sent for transfer in sent))


@value
def layout_name(layout: Layout) -> str:
    """As it prints, with a hyphen at which no line breaks."""
    return str(layout).replace("-", "\N{NON-BREAKING HYPHEN}")
