"""Published models other than Llamas: GPT-3 and DeepSeek-V3.

    GPT layer         4 h h + 2 h f matrices, a bias for each, two norms of 2 h
      outside         V h embedding (the head is tied to it), S h positions, norm 2 h

    MLA layer         h q, q a (n + r)       queries through a rank of q
                      h (k + r), k a (n + v) keys and values through a rank of k
                      a v h                  output
                      q + k                  a norm of each rank

    n width of a head without positions, r with rotary positions, v of its values

DeepSeek-V3 is its main model: without the module that predicts a second token, with the
bias of each router (one number an expert, which no gradient reaches).

Sources: Brown et al., Language Models are Few-Shot Learners, 2020, table 2.1; Narayanan
et al., 2021, equation 2; DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 4.2.
"""

from dataclasses import dataclass
from typing import ClassVar

from xtrain.plan.checks import require_whole
from xtrain.plan.shapes import OTHERS, ModelShape


@dataclass(frozen=True, kw_only=True)
class GPTShape(ModelShape):
    """A decoder with learned positions, biases, LayerNorm and a GELU MLP."""

    mlp_matrices: ClassVar[int] = 2
    max_position_embeddings: int
    """Rows of the table of positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("max_position_embeddings", self.max_position_embeddings)
        if self.num_local_experts:
            raise ValueError(
                f"num_local_experts={self.num_local_experts}: a GPT layer has none"
            )

    def vectors_of_layer(self, layer: int) -> int:
        """Two norms with biases, and the biases of four and of two matrices."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        cut = heads * self.head_dim + self.intermediate_size
        return self.replicated_of_layer(layer) + cut

    def replicated_of_layer(self, layer: int) -> int:
        """Norms, and the biases that are added after a sum over ranks."""
        return 6 * self.hidden_size

    @property
    def last_norm(self) -> int:
        return 2 * self.hidden_size

    @property
    def position_table(self) -> int:
        return self.max_position_embeddings * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class LatentShape(ModelShape):
    """A decoder with multi-head latent attention (MLA), as DeepSeek-V3.

    `head_dim` is the width of a head's keys without rotary positions.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"):
            require_whole(name, getattr(self, name))

    @property
    def ranks_down(self) -> int:
        """Width of what queries, keys and values are made of."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_width(self) -> int:
        per_head = self.head_dim + self.qk_rope_head_dim + self.v_head_dim
        return self.num_attention_heads * per_head

    def vectors_of_layer(self, layer: int) -> int:
        """Two norms, one of each rank, and a router's bias."""
        ranks = self.q_lora_rank + self.kv_lora_rank
        bias = self.num_local_experts if self.is_moe(layer) else 0
        return 2 * self.hidden_size + ranks + bias

    def replicated_of_layer(self, layer: int) -> int:
        """Norms, the router and its bias, and what leads down to the ranks."""
        router = self.num_local_experts if self.is_moe(layer) else 0
        down = self.ranks_down + router
        return self.vectors_of_layer(layer) + down * self.hidden_size

    def attention_products(self, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Down to the ranks, whole on every device, and up to this one's heads."""
        heads = -(-self.num_attention_heads // ranks)
        return (
            (self.hidden_size, self.ranks_down),
            (self.q_lora_rank, heads * (self.head_dim + self.qk_rope_head_dim)),
            (self.kv_lora_rank, heads * (self.head_dim + self.v_head_dim)),
            (heads * self.v_head_dim, self.hidden_size),
        )

    def recomputed_products(self, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """From the ranks up to queries, keys and values."""
        return self.attention_products(ranks)[1:3]

    def _attention_matrices(self) -> int:
        heads, hidden = self.num_attention_heads, self.hidden_size
        queries = self.q_lora_rank * heads * (self.head_dim + self.qk_rope_head_dim)
        keys = self.kv_lora_rank * heads * (self.head_dim + self.v_head_dim)
        out = heads * self.v_head_dim * hidden
        return hidden * self.ranks_down + queries + keys + out


DEEPSEEK_V3 = LatentShape(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    head_dim=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_local_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    first_k_dense_replace=3,
)
GPT_3 = GPTShape(
    vocab_size=50257,
    hidden_size=12288,
    intermediate_size=49152,
    num_hidden_layers=96,
    num_attention_heads=96,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
PUBLISHED: dict[str, ModelShape] = {"gpt-3-175b": GPT_3, "deepseek-v3": DEEPSEEK_V3}
OTHERS.update(PUBLISHED)
