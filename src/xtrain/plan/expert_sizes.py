"""The sizes of a model's experts, which replace a layer's SwiGLU.

    first_k_dense_replace layers    SwiGLU            3 h f
    the other layers                router            E h      E experts, h hidden size
                                    experts           E 3 h m  m an expert's inner size
                                    shared experts    s 3 h m  as one of inner size s m

A token is routed to k of the E experts, so only part of the parameters is active.

Sources: Jiang et al., Mixtral of Experts, 2024; DeepSeek-AI, DeepSeek-V3 Technical
Report, 2024 (shared experts, and first layers without experts).
"""

from dataclasses import dataclass

from xtrain.plan.checks import require_whole


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of experts, under the names of Mixtral's and DeepSeek's `config.json`.

    A model without experts is dense, and all of them are 0 then.
    """

    num_local_experts: int = 0
    """Of a layer, on all ranks together: E."""
    num_experts_per_tok: int = 0
    """Experts of a token: k."""
    moe_intermediate_size: int | None = None
    """An expert's inner size; intermediate_size unless given."""
    n_shared_experts: int = 0
    """Experts that process every token."""
    first_k_dense_replace: int = 0
    """The first so many layers have no experts."""

    def is_moe(self, layer: int) -> bool:
        """Whether the layer of this number has experts."""
        return self.num_local_experts > 0 and layer >= self.first_k_dense_replace

    def check_experts(self, intermediate: int, layers: int) -> None:
        """ValueError unless the sizes fit each other; fills in what was not given."""
        for name in COUNTS:
            require_whole(name, getattr(self, name), least=0)
        experts, inner = self.num_local_experts, self.moe_intermediate_size
        if not experts:
            for name in (*COUNTS, "moe_intermediate_size"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} of a model without experts: "
                        "num_local_experts=0"
                    )
            return
        require_whole("num_experts_per_tok", self.num_experts_per_tok)
        if self.num_experts_per_tok > experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is above "
                f"num_local_experts={experts}"
            )
        if self.first_k_dense_replace >= layers:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} of "
                f"num_hidden_layers={layers} leaves no layer with experts"
            )
        inner = intermediate if inner is None else inner
        require_whole("moe_intermediate_size", inner)
        object.__setattr__(self, "moe_intermediate_size", inner)


COUNTS = (
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
)
