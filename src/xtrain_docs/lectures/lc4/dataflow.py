"""What each tensor of a cut module is on the ranks, declared once.

    replicated       every rank has the whole tensor
    split D          rank r has slice r of dim D
    split D by R     R ranks after one another have the same slice of dim D
    partial          the sum over the ranks is the whole tensor
    partial D by R   the sum over R ranks after one another is a slice of dim D
    largest          the elementwise maximum over the ranks is the whole tensor

The pictures are drawn from `flow`, and tests/tensor_parallel/test_dataflow.py checks
every state of it on real ranks against a whole module in one process.

Shape letters: B batch, S sequence, H hidden, F inner size of the MLP, K inputs and O
outputs of a linear layer, V vocabulary, T tokens, heads: all heads' elements together.
"""

from typing import NamedTuple

R, P = "replicated", "partial"
KEY_HEADS = 2
"""Of attention: with more ranks several hold the same key head."""


class Row(NamedTuple):
    """A row of a picture, from the module's input down to its output.

    tensor   its name, shape and state, and that of its gradient
    band     communication between the rows above and below: what runs forward, what
             backward, and what backward does `again`; a pair of them has a name
    product  a matmul with these weights
    """

    kind: str
    name: str = ""
    letters: str = ""
    forward: str = ""
    backward: str | None = ""
    again: str = ""
    pair: bool = True
    beside: bool = False
    weights: tuple[str, ...] = ()


class Weight(NamedTuple):
    """A parameter: what a rank holds, its gradient, and that before it is summed."""

    name: str
    letters: str
    value: str
    grad: str
    before_sum: str | None = None


def tensor(
    name: str, letters: str, forward: str, backward: str | None, beside: bool = False
) -> Row:
    return Row("tensor", name, letters, forward, backward, beside=beside)


def alike(name: str, letters: str, state: str, beside: bool = False) -> Row:
    """The gradient is in the state of the tensor."""
    return tensor(name, letters, state, state, beside)


def band(forward: str, backward: str, again: str = "", pair: bool = True) -> Row:
    return Row("band", forward=forward, backward=backward, again=again, pair=pair)


def product(*weights: str) -> Row:
    return Row("product", weights=weights)


def entrance(name: str, outside: str) -> list[Row]:
    """f: each rank uses what comes in for another part of the result."""
    plain = outside == R
    f = ("", "all-reduce") if plain else ("all-gather", "reduce-scatter", "all-gather")
    return [band(*f), tensor(name, "B S H", R, P)]


def exit_of(name: str, outside: str) -> list[Row]:
    """g: the ranks' parts are summed."""
    plain = outside == R
    g = ("all-reduce", "") if plain else ("reduce-scatter", "all-gather")
    return [tensor(name, "B S H", P, R), band(*g), alike(name, "B S H", outside)]


def swiglu(x: str, y: str, outside: str = R, at: str = "") -> list[Row]:
    """From f to g."""
    return [
        *entrance(x, outside),
        product(f"{at}gate_proj.weight", f"{at}up_proj.weight"),
        alike("gate, up", "B S F", "split 2"),
        alike("silu(gate) · up", "B S F", "split 2"),
        product(f"{at}down_proj.weight"),
        *exit_of(y, outside),
    ]


def attention(x: str, y: str, ranks: int, outside: str = R, at: str = "") -> list[Row]:
    """From f to g."""
    made = [alike("q, k, v", "B S heads", "split 2")]
    if copies := copies_of_key_heads(ranks):
        keys = tensor(
            "k, v", "B S heads", f"split 2{copies}", f"partial 2{copies}", True
        )
        made = [alike("q", "B S heads", "split 2"), keys]
    return [
        *entrance(x, outside),
        product(*(f"{at}{name}_proj.weight" for name in "qkv")),
        *made,
        alike("heads' output", "B S heads", "split 2"),
        product(f"{at}o_proj.weight"),
        *exit_of(y, outside),
    ]


def copies_of_key_heads(ranks: int) -> str:
    """ " by 2" where two ranks hold the same key head."""
    return f" by {ranks // KEY_HEADS}" if ranks > KEY_HEADS else ""


def layer(ranks: int, outside: str) -> list[Row]:
    """A decoder layer without its residual connections."""
    return [
        alike("x", "B S H", outside),
        alike("norm of x", "B S H", outside),
        *attention("norm of x", "attention", ranks, outside, "self_attn."),
        alike("x + attention", "B S H", outside),
        alike("its norm", "B S H", outside),
        *swiglu("its norm", "MLP", outside, "mlp."),
        alike("y", "B S H", outside),
    ]


def rows_of(module: str, ranks: int) -> list[Row]:
    """The rows of one of MODULES."""
    ids = tensor("ids", "B S", R, None)
    match module:
        case "column_linear":
            return [
                alike("x", "B S K", R),
                band("", "all-reduce"),
                tensor("x", "B S K", R, P),
                product("weight"),
                alike("x Wᵀ", "B S O", "split 2"),
                alike("y", "B S O", "split 2"),
            ]
        case "row_linear":
            return [
                alike("x", "B S K", "split 2"),
                product("weight"),
                tensor("x Wᵀ", "B S O", P, R),
                band("all-reduce", ""),
                alike("x Wᵀ", "B S O", R),
                alike("y", "B S O", R),
            ]
        case "vocab_parallel_embedding":
            return [ids, *exit_of("y", R)]
        case "hidden_parallel_embedding":
            split = alike("y", "B S H", "split 2")
            return [ids, split, band("all-gather", ""), alike("y", "B S H", R)]
        case "cross_entropy":
            largest, sums = ("largest logit", "T"), ("sum of exp, label's", "2 T")
            return [
                alike("logits", "T V", "split 1"),
                tensor(*largest, "largest", None),
                band("all-reduce MAX", "", pair=False),
                tensor(*largest, R, None),
                tensor(*sums, P, None),
                band("all-reduce", "", pair=False),
                tensor(*sums, R, None),
                alike("loss", "T", R),
            ]
        case "swiglu":
            return [alike("x", "B S H", R), *swiglu("x", "y")]
        case "attention":
            return [alike("x", "B S H", R), *attention("x", "y", ranks)]
        case "decoder_layer":
            return layer(ranks, R)
        case "decoder_layer_sequence_parallel":
            return layer(ranks, "split 1")
    raise ValueError(f"no data flow of {module!r}; there are: {', '.join(MODULES)}")


def weights_of(module: str, ranks: int) -> list[Weight]:
    """The parameters of one of MODULES."""
    copies = copies_of_key_heads(ranks)
    shared = f"partial 0{copies}" if copies else None
    key = ("heads H", f"split 0{copies}", f"split 0{copies}", shared)
    heads = [
        ("q_proj", "heads H", "split 0", "split 0"), ("k_proj", *key),
        ("v_proj", *key), ("o_proj", "H heads", "split 1", "split 1"),
    ]  # fmt: skip
    inner = [
        ("gate_proj", "F H", "split 0", "split 0"),
        ("up_proj", "F H", "split 0", "split 0"),
        ("down_proj", "H F", "split 1", "split 1"),
    ]
    norm = ("H", R, R, P if module.endswith("sequence_parallel") else None)
    whole = [
        ("input_layernorm", *norm),
        *((f"self_attn.{name}", *rest) for name, *rest in heads),
        ("post_attention_layernorm", *norm),
        *((f"mlp.{name}", *rest) for name, *rest in inner),
    ]
    found: dict[str, list] = {
        "column_linear": [("weight", "O K", "split 0", "split 0"),
                          ("bias", "O", "split 0", "split 0")],
        "row_linear": [("weight", "O K", "split 1", "split 1"), ("bias", "O", R, R)],
        "vocab_parallel_embedding": [("weight", "V H", "split 0", "split 0")],
        "hidden_parallel_embedding": [("weight", "V H", "split 1", "split 1")],
        "cross_entropy": [], "swiglu": inner, "attention": heads,
    }  # fmt: skip
    return [
        Weight(f"{name}.weight" if "_" in name or "norm" in name else name, *rest)
        for name, *rest in found.get(module, whole)
    ]


MODULES = (
    "column_linear",
    "row_linear",
    "vocab_parallel_embedding",
    "hidden_parallel_embedding",
    "cross_entropy",
    "swiglu",
    "attention",
    "decoder_layer",
    "decoder_layer_sequence_parallel",
)
